"""Mathematical answers; the table of pairs is checks/verifiers/pairs.jsonl."""

import json

import pytest

from checks.verifiers import PAIRS
from megatron_opd.data.tasks.maths import equal, plainer, verify

ROWS = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
# what the library takes for two things: an inequality, and the interval that it describes
UNDECIDED = {"\\boxed{x \\le 2}", "\\boxed{x \\leq 2}"}


def test_the_table_is_judged_as_by_hand_but_for_what_is_listed():
    assert len(ROWS) >= 200
    wrong = [row for row in ROWS if verify(row["response"], row["answer"]) != row["right"]]
    assert {row["response"] for row in wrong} == UNDECIDED, wrong


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1 234 567", "1234567"),
        (r"1\,234\,567.5", "1234567.5"),
        ("12 34", "12 34"),
        ("1 2345", "1 2345"),
        ("3.2e5", r"3.2 \cdot 10^{5}"),
        ("1E-3", r"1 \cdot 10^{-3}"),
        ("2e", "2e"),
        ("60°", "60"),
        (r"60\text{ degrees}", r"60\text{}"),
        ("1 3/4", r"1\frac{3}{4}"),
        ("1/3/4", "1/3/4"),
        (r"0.\overline{3}", r"\frac{3}{9}"),
        (r"2.1\overline{6}", r"\frac{195}{90}"),
        ("18 dollars", "18"),
        ("18 US dollars", "18 US dollars"),
        ("2 alpha", "2 alpha"),
        ("5 percent", "5 percent"),
        ("x + 5", "x + 5"),
    ],
)
def test_what_the_library_does_not_read_is_rewritten(text, plain):
    assert plainer(text) == plain


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (r"\frac{195}{90}", r"2.1\overline{6}", True),
        ("2 alpha", "2 beta", False),
        ("1 000", "1000", True),
        ("1 000", "1", False),
        ("x+y", "y+x", True),
        ("1/0", "2", False),
        ("{" * 50, "2", False),
        ("\\frac{", "2", False),
    ],
)
def test_answers_are_compared_as_mathematics(given, expected, same):
    assert equal(given, expected) is same


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("She has 3 boxes of 4, so there are 12 eggs.", True),
        ("She has 3 boxes of 4, so there are $12$ eggs.", True),
        ("She has 12 boxes.\nSo there are 13 eggs in all.", False),
        ("The answer is \\boxed{13}, not 12 eggs as I said.", False),
        ("#### 13\nThere are 12 eggs there.", False),
        ("There are 12 eggs: \\boxed{1", False),
        ("\\boxed{not known, perhaps 12}", False),
        ("\\boxed{}\nSo there are 12 eggs.", False),
    ],
)
def test_only_an_unmarked_line_is_searched(response, right):
    assert verify(response, "12") is right


def test_a_solution_in_the_answer_column_is_read_too():
    assert verify("\\boxed{0.5}", "Half of it, so $\\boxed{\\frac{1}{2}}$.") is True
    assert verify("\\boxed{0.5}", "It is 1 of 2.\n#### 1/2") is True
