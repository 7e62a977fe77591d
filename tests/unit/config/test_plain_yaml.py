"""YAML without surprises: scalars, keys, tags, and a way there and back."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_opd.config.plain_yaml import dump_plain, load_plain
from megatron_opd.config.unique_keys import DuplicateKey


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e3", 1000.0),
        ("3e-4", 3e-4),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("-7", -7),
        (".inf", float("inf")),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        ("yes", True),
        ("null", None),
        ("'5'", "5"),
    ],
)
def test_yaml_scalars_are_what_they_look_like(written: str, value: object):
    found = load_plain(f"a: {written}", "test")["a"]
    assert found == value
    assert type(found) is type(value)
    assert load_plain(dump_plain({"a": value}), "dump") == {"a": value}


@example({"\x85": "a\u2028b", "c": "\u2029"})
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats(allow_nan=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_what_is_dumped_is_read_as_it_was(tree: object):
    assert load_plain(dump_plain(tree), "dump") == tree


@pytest.mark.parametrize("text", ["\x85", "a\u2028b", "\u2029"])
def test_breaks_that_are_not_ascii_survive_as_keys_and_values(text: str):
    assert load_plain(dump_plain({text: text}), "dump") == {text: text}


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2", "a: {b: 1, b: 2}", "- {x: 1, 'x': 2}", "{1: a, '1': b}"]
)
def test_a_key_given_twice_is_refused_at_any_depth(text: str):
    with pytest.raises(DuplicateKey, match="is given twice"):
        load_plain(text, "test")


@pytest.mark.parametrize(
    "text", ["!!int abc", "!!float x", "9" * 5000, "!!python/name:os.system ''"]
)
def test_a_tag_that_does_not_fit_is_an_error_of_yaml(text: str):
    with pytest.raises(yaml.YAMLError):
        load_plain(f"a: {text}", "test")
