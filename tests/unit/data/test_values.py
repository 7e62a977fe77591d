"""Values of rows as tables, NumPy and pandas hold them, and the keys that lead to them."""

import math
import string
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data.faults import Unusable
from megatron_opd.data.files import located_rows
from megatron_opd.data.plain import table_rows
from megatron_opd.data.records import Columns, scan_records
from megatron_opd.data.values import read_answer, read_limit, read_plain, read_text, read_weight

VERL = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 7, "tags": ["a", {"b": "c"}]},
}


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("reward_model.ground_truth", "2"),
        ("extra_info.index", "7"),
        ("extra_info.tags.0", "a"),
        ("extra_info.tags.1.b", "c"),
        ("extra_info.tags.2", None),
        ("extra_info.none", None),
        ("nowhere.at.all", None),
    ],
)
def test_keys_lead_into_columns(key, answer):
    assert read_answer(VERL, key, needed=False) == answer


def test_a_name_with_a_dot_wins():
    row = {"a.b": "name", "a": {"b": "path", "c.d": "inner", "c": {"d": "path"}}}
    assert read_text(row, "a.b") == "name"
    assert read_text(row, "a.c.d") == "inner"
    assert read_text({"a.b": {"c": "x"}, "a": {"b": {"c": "y"}}}, "a.b.c") == "x"


def test_a_key_that_leads_into_a_text_is_a_fault():
    with pytest.raises(Unusable, match=r"'reward_model\.style' must hold 'x', but it is a str"):
        read_answer(VERL, "reward_model.style.x", needed=False)
    with pytest.raises(Unusable, match=r"missing column 'reward_model\.x'"):
        read_text(VERL, "reward_model.x")
    assert read_answer({"a": None}, "a.b", needed=False) is None


def test_tables_are_read_by_the_column_that_a_key_begins_with(tmp_path):
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    row = {key: VERL[key] for key in ("prompt", "reward_model")} | {"a.b": "n", "unread": 1}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    keys = ("prompt", "reward_model.ground_truth", "a.b")
    ((_, found),) = located_rows(path, keys, keys)
    assert set(found) == {"prompt", "reward_model", "a.b"}
    ((_, record),) = scan_records(path, Columns(texts=keys[1:], chats=keys[:1]))
    assert record["reward_model.ground_truth"] == "2"
    with pytest.raises(ValueError, match=r"missing column 'nothing\.x'"):
        list(located_rows(path, ("nothing.x",), ("nothing.x",)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(4), "4"),
        (np.uint8(200), "200"),
        (np.float64(4.0), "4"),
        (np.float32(0.1), "0.1"),
        (np.float16(0.1), "0.1"),
        (np.str_("x"), "x"),
        (np.str_("x\0"), "x\0"),
        (np.array(7), "7"),
        (np.array("word"), "word"),
        (np.array(["a", "b"], dtype=object), ("a", "b")),
        (np.array([1, 2]), ("1", "2")),
        (np.float64("nan"), None),
        (math.nan, None),
        (np.datetime64("NaT"), None),
        (np.datetime64("2024-02-29"), "2024-02-29"),
        (np.datetime64("2024-02-29T01:02:03.5"), "2024-02-29T01:02:03.500000"),
        (np.datetime64(1, "ns"), "1970-01-01T00:00:00.000000001"),
        (date(2024, 1, 1), "2024-01-01"),
        (datetime(2024, 1, 1, 12), "2024-01-01T12:00:00"),
        (Decimal("2.00"), "2"),
        (Decimal("2.50"), "2.5"),
        (Decimal("-0.00"), "0"),
        (Decimal("1E+3"), "1000"),
        (Decimal("12345678901234567890123456789012.10"), "12345678901234567890123456789012.1"),
        (Decimal("NaN"), None),
        (Fraction(1, 2), "1/2"),
        (Fraction(-6, 3), "-2"),
        (Decimal("sNaN"), None),
        (1e3, "1000"),
        ("1,000", "1,000"),
        ("0.50", "0.50"),
        (["0", "0.0"], ("0", "0.0")),
        (["0"], "0"),
        (["", None, "x", "x", math.nan], "x"),
        ([], None),
        ([Decimal("1.0"), 2], ("1", "2")),
    ],
)
def test_answers_are_what_is_written(value, text):
    assert read_answer({"answer": value}, "answer", needed=False) == text


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.bool_(True), b"x", np.timedelta64(1, "ns"), {"a": 1}, [["1"]], [True], 1j),
        *(np.complex64(1), Decimal("1E+99999999"), Decimal("inf"), math.inf, 2**5000),
        Fraction(1, 2**5000),
        *(np.longdouble(1), object()),
    ],
)
def test_what_is_no_answer_is_a_fault_of_one_line(value):
    with pytest.raises(Unusable) as caught:
        read_answer({"answer": value}, "answer", needed=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 0.5, True, None, "é"], "b": {}}, {"a": [1, 0.5, True, None, "é"], "b": {}}),
        ((np.int64(2), np.float32(0.1), np.array([1, 2])), [2, 0.1, [1, 2]]),
        ("", ""),
        (math.nan, None),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_columns_that_are_passed_on_hold_what_json_has(value, read):
    assert read_plain({"goal": value}, "goal") == read
    assert read_plain({"in": {"goal": value}}, "in.goal") == read
    assert read_plain({}, "goal") is None


@pytest.mark.parametrize(
    "value",
    [b"x", datetime(2020, 1, 1), Decimal("1.5"), 2**63, -math.inf, [math.nan], {1: 2}, "\ud83d"],
)
def test_columns_that_json_does_not_have_are_faults_of_one_line(value):
    for given_value in (value, [value], {"a": value}):
        with pytest.raises(Unusable) as caught:
            read_plain({"goal": given_value}, "goal")
        assert str(caught.value).startswith("'goal'")
        assert "\n" not in str(caught.value)


def test_a_mapping_as_an_answer_says_what_to_name():
    with pytest.raises(Unusable, match=r"'ground_truth', 'style'; name what counts, such as "):
        read_answer({"reward_model": VERL["reward_model"]}, "reward_model", needed=True)
    with pytest.raises(Unusable) as caught:
        read_answer({"a": {"\0\n" * 999: 1}}, "a", needed=True)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_pandas_missing_values_are_missing():
    kinds = [type(n, (), {"__module__": "pandas._libs"}) for n in ("NAType", "NaTType")]
    for kind in kinds:
        assert read_answer({"answer": kind()}, "answer", needed=False) is None


def test_limits_and_weights_of_other_libraries():
    row = {"most": np.int32(5), "w": np.float32(0.5), "d": Decimal("3.0"), "n": math.nan}
    assert read_limit(row, "most", 9) == 5
    assert read_limit(row, "d", 9) == 3
    assert read_limit(row, "n", 9) is None
    assert (read_weight(row, "w"), read_weight(row, "d")) == (0.5, 3.0)
    with pytest.raises(Unusable, match="'n' must be finite and >= 0, got nan"):
        read_weight(row, "n")


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        *((5e-05, "0.00005"), (-1.5e-7, "-0.00000015"), (1e-08, "1e-08"), (0.0001, "0.0001")),
        *((1e16, "10000000000000000"), (1.5e20, "150000000000000000000"), (1e21, "1e+21")),
        *((0.30000000000000004, "0.30000000000000004"), (-0.0, "0"), (123456.5, "123456.5")),
        *((1.2345678901234567e16, "1.2345678901234568e+16"), (float(2**53), str(2**53))),
    ],
)
def test_a_float_is_written_as_people_do(number: float, answer: str):
    """Before: a right 0.00005 was graded wrong."""
    assert read_answer({"answer": number}, "answer", needed=True) == answer


@given(st.decimals("1e-6", "1e20", allow_nan=False, places=6))
def test_a_float_gives_back_what_was_written(number: Decimal):
    digits = number.normalize().as_tuple().digits
    if len(digits) <= 15:
        found = read_answer({"answer": float(number)}, "answer", needed=True)
        assert found == f"{number.normalize():f}"


def test_columns_of_short_floats_hold_what_was_written(tmp_path):
    from pyarrow import parquet

    path, numbers = tmp_path / "a.parquet", [0.1, None, 2.5]
    table = pyarrow.table({"prompt": ["x"] * 3, "answer": pyarrow.array(numbers, "float32")})
    parquet.write_table(table, path)
    found = [row[1]["answer"] for row in scan_records(path, Columns(("prompt",), ("answer",)))]
    assert found == ["0.1", None, "2.5"]


SHORT = pyarrow.float32()
NESTED = [
    (pyarrow.list_(SHORT), [0.1, 2.5], [0.1, 2.5]),
    (pyarrow.large_list(pyarrow.list_(SHORT, 1)), [[0.1], None], [[0.1], None]),
    (pyarrow.list_view(pyarrow.float16()), [0.1], [0.1]),
    (pyarrow.map_(pyarrow.string(), SHORT), [("k", 0.3)], {"k": 0.3}),
    (pyarrow.struct([("gt", SHORT), ("of", pyarrow.string())]), {"gt": 0.7}, {"gt": 0.7}),
    (pyarrow.struct([("in", pyarrow.struct([("gt", SHORT)]))]), {"in": {"gt": 0.1}}, None),
]


@pytest.mark.parametrize(("kind", "written", "read"), NESTED, ids=lambda each: str(each)[:30])
def test_short_floats_inside_of_columns_hold_what_was_written(kind, written, read):
    table = pyarrow.table({"answer": pyarrow.array([written, None], kind)})
    assert table_rows(table) == [{"answer": read or written}, {"answer": None}]
    column = pyarrow.array([written], kind)
    one = pyarrow.table({"answer": pyarrow.StructArray.from_arrays([column], ["by"])})
    assert table_rows(one) == [{"answer": {"by": read or written}}]


def test_coded_short_floats_hold_what_was_written():
    coded = pyarrow.array([0.1, None], SHORT).dictionary_encode()
    assert table_rows(pyarrow.table({"answer": coded})) == [{"answer": 0.1}, {"answer": None}]


names = st.text(string.ascii_lowercase, min_size=1, max_size=3)
trees = st.recursive(
    st.text(min_size=1).filter(str.strip),
    lambda inner: st.one_of(st.dictionaries(names, inner, min_size=1), st.lists(inner, min_size=1)),
)


def leaves(value, path=()):
    if isinstance(value, str):
        yield path, value
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in pairs:
        yield from leaves(each, (*path, str(name)))


@given(trees.filter(lambda tree: isinstance(tree, dict)))
def test_every_leaf_is_found_by_its_path(tree):
    for path, text in leaves(tree):
        assert read_text(tree, ".".join(path)) == text
