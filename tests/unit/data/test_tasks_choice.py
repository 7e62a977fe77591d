"""Letters of multiple-choice answers, and JSON against schemas."""

import json

import pytest

from megatron_opd.data.tasks import get_verifier
from megatron_opd.data.tasks.multiple_choice import choice


@pytest.mark.parametrize(
    "text",
    [
        *("B", "b", "(B)", "[b]", "B.", "B)", "**B**", "$B$", r"\text{B}", r"\textbf{(B)}"),
        *("(B) 42", "B. 42", "B) because of A", "option B", "Option: (B)", "the correct answer B"),
        *(" B ", "B:", "**(B)** Paris", "Choice b."),
    ],
)
def test_one_letter_with_marks_around_it_is_a_choice(text):
    assert choice(text) == "B"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "42", "A triangle", "Both", "A or B", "BC", "(BC)", "B42", "é", "(B", "I think"),
        *("B.5", "a = b", "neither A nor B", "ß"),
    ],
)
def test_anything_else_is_none(text):
    assert choice(text) is None


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("The area is 6.\nThe answer is (C).", True),
        ("A is wrong, B too.\n\\boxed{C}", True),
        ("\\boxed{\\text{C}}", True),
        ("#### C", True),
        ("**Answer: C**", True),
        ("Answer: C) 42", True),
        ("The answer is (C).\nOr rather (D).", False),
        ("The answer is B.", False),
        ("C seems right.", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("answer", ["C", "(C)", "c", "C. 42", "\\boxed{C}"])
def test_the_final_answer_chooses(response, right, answer):
    assert get_verifier("multiple_choice")(response, answer) is right


def test_a_row_without_a_letter_is_never_right():
    assert get_verifier("multiple_choice")("42", "42") is False


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', True),
        ('```json\n{"name": "x"}\n```\n```\n{"name": "Ada", "age": 36}\n```', True),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": -1}', False),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": 36, "x": 1}', False),
        ('{"name": "Ada", "age": NaN}', False),
        ('{"name": "Ada", "age": 36', False),
        ('Sure! {"name": "Ada", "age": 36}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_fits_its_schema(response, right):
    assert get_verifier("json_schema")(response, SCHEMA) is right


def test_nan_is_no_json_number():
    verify = get_verifier("json_schema")
    assert verify("1.5", '{"type": "number"}') is True
    assert verify("NaN", '{"type": "number"}') is False
    assert verify("-Infinity", '{"type": "number"}') is False


def test_the_draft_of_a_schema_counts():
    """Draft 4 has a boolean exclusiveMinimum, the newest a number."""
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1}
    old["exclusiveMinimum"] = True
    verify = get_verifier("json_schema")
    assert verify("2", json.dumps(old)) is True
    assert verify("1", json.dumps(old)) is False
    meta = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    assert verify('{"type": "object"}', json.dumps(meta)) is True
    assert verify('{"type": 3}', json.dumps(meta)) is False


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("{", "Expecting"),
        ('{"type": "objekt"}', "the answer is no JSON schema"),
        ('{"$ref": "http://127.0.0.1:9/schema"}', "Unresolvable"),
    ],
)
def test_a_row_whose_schema_cannot_be_used_fails(answer, words):
    with pytest.raises(Exception, match=words):
        get_verifier("json_schema")("{}", answer)
