"""Which files a data path names, and what their rows are, whatever their kind."""

import csv
import gzip
import io
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_opd.data import files, lines
from megatron_opd.data.faults import Fault
from megatron_opd.data.files import data_crc32, located_rows, open_rows
from megatron_opd.data.plain import without_gaps
from megatron_opd.data.records import Columns, scan_records
from megatron_opd.data.shards import data_files, is_there

ROWS = [{"prompt": f"{n} + 1 = ü\n", "answer": str(n + 1)} for n in range(7)]


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


def jsonl(rows: Any) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def table(rows: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


def comma(rows: Any) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


KINDS = {
    ".jsonl": jsonl,
    ".NDJSON": jsonl,
    ".json": lambda rows: json.dumps(rows, indent=2).encode(),
    ".parquet": table,
    ".csv": comma,
}
WRITERS = KINDS | {
    name + packed: lambda rows, write=write, pack=pack: pack(write(rows))
    for name, write in KINDS.items()
    for packed, pack in ((".gz", gzip.compress), (".zst", zstd))
    if name != ".parquet"
}


def rows_of(path: Path) -> list[Any]:
    found = list(located_rows(path, ("prompt", "answer"), ("prompt",)))
    assert not any(isinstance(row, Fault) for row in found), found
    return [row[1] for row in found if not isinstance(row, Fault)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_alone_in_a_folder_and_by_a_pattern(tmp_path: Path, suffix: str):
    write = WRITERS[suffix]
    alone = tmp_path / f"a{suffix}"
    alone.write_bytes(write(ROWS))
    assert rows_of(alone) == ROWS
    folder = tmp_path / "shards"
    folder.mkdir()
    for n, part in enumerate((ROWS[:3], ROWS[3:4], ROWS[4:])):
        (folder / f"train-{n:05d}-of-00003{suffix}").write_bytes(write(part))
    for beside in ("README.md", "LICENSE", "dataset_infos.json", ".gitattributes", "_SUCCESS"):
        (folder / beside).write_bytes(b"no rows")
    pattern = folder / f"train-*{suffix}"
    assert rows_of(folder) == rows_of(pattern) == ROWS
    assert is_there(pattern)
    opened = open_rows(folder, ("prompt", "answer"), ())
    assert [opened.row(n) for n in (6, 0, 3)] == [list(opened)[n] for n in (6, 0, 3)]
    by_line = "json" in suffix.lower() and not suffix.startswith(".json.") and suffix != ".json"
    last = folder / f"train-00002-of-00003{suffix}"
    assert list(opened)[-1][0] == f"{last}:3" if by_line else f"{last} row 3"  # pyright: ignore
    assert data_crc32([folder]) == data_crc32([pattern]) == data_crc32(sorted(folder.glob("t*")))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "holds no data files"),
        (["README.md"], "holds no data files"),
        (["a.jsonl", "b.parquet"], "several kinds, such as 'a.jsonl' and 'b.parquet'"),
        (["a.jsonl", "a.jsonl.gz"], "several kinds"),
        (["a.jsonl", "b.txt"], r"b\.txt of .*: data files end with \.jsonl"),
        (["a.parquet.gz"], "data files end with"),
        (["train-0.jsonl", "test-0.jsonl"], "holds the splits 'test', 'train': give a pattern"),
        (["a/train.jsonl"], "holds the folders 'a': name one of them"),
    ],
)
def test_a_folder_whose_rows_are_not_clear_is_one_line(
    tmp_path: Path, names: list[str], words: str
):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl(ROWS))
    with pytest.raises(ValueError, match=words) as caught:
        data_files(tmp_path)
    assert "\n" not in str(caught.value)


def test_patterns_that_fit_nothing_or_folders(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match="data file not found: no file fits"):
        data_files(tmp_path / "*.parquet")
    assert not is_there(tmp_path / "*.parquet")
    with pytest.raises(ValueError, match="fits the folder"):
        data_files(tmp_path / "*")
    file = tmp_path / "a" / "b" / "[1].jsonl"
    file.write_bytes(jsonl(ROWS))
    assert data_files(file) == data_files(tmp_path / "**" / "*.jsonl") == [file]


def test_csv_is_text_except_where_numbers_are_asked_for(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"\xef\xbb\xbfprompt,answer,most,weight,x\r\n"
        b'"one, ""two""\r\nthree",007,3,0.5,\r\n'
        b"NA,1.50,,1,y\r\n"
        b'2024-01-02,,4,2,"z"\r\n'
    )
    columns = Columns(("prompt",), ("answer",), limits={"most": 9}, reward_weight="weight")
    found = [row[1] for row in scan_records(path, columns) if not isinstance(row, Fault)]
    assert [row["prompt"] for row in found] == ['one, "two"\r\nthree', "NA", "2024-01-02"]
    assert [row["answer"] for row in found] == ["007", "1.50", None]
    assert [row["most"] for row in found] == [3, None, 4]
    assert [row["weight"] for row in found] == [0.5, 1.0, 2.0]
    path.write_bytes(b"prompt\na\nb,c\n")
    with pytest.raises(ValueError, match=r"not a readable csv file .*Expected 1 columns, got 2"):
        rows_of(path)
    path.write_bytes(b"question\na\n")
    with pytest.raises(ValueError, match=r"a\.csv: missing column 'prompt'; the columns are"):
        rows_of(path)


@pytest.mark.parametrize("suffix", [name for name in WRITERS if name.endswith((".gz", ".zst"))])
def test_a_packed_file_that_was_cut_is_refused_and_joined_ones_are_whole(tmp_path, suffix):
    whole = WRITERS[suffix](ROWS)
    path = tmp_path / f"a{suffix}"
    for length in (len(whole) - 1, len(whole) // 2, 5):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cannot be read|not a readable") as caught:
            rows_of(path)
        assert "\n" not in str(caught.value)
    if "ndjson" in suffix.lower():
        path.write_bytes(whole + whole)  # as shards are joined with cat
        assert rows_of(path) == ROWS + ROWS


def test_parquet_of_nested_and_odd_types(tmp_path: Path):
    path = tmp_path / "a.parquet"
    prompt = pyarrow.array(["a", "b", "a", "b"] * 300).dictionary_encode()
    answer = pyarrow.array([{"x": [Decimal("1.50")]}, None, {"x": None}, {"x": []}] * 300)
    parquet.write_table(
        pyarrow.table([prompt, answer], names=["prompt", "answer"]), path, row_group_size=350
    )
    whole = parquet.read_table(path).to_pylist()
    assert rows_of(path) == [{k: without_gaps(v) for k, v in row.items()} for row in whole]


def test_a_moment_beyond_the_calendar_is_the_fault_of_its_row(tmp_path: Path):
    path = tmp_path / "a.parquet"
    moments = pyarrow.array([0, 2**62, 1], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table([["a", "b", "c"], moments], names=["prompt", "answer"]), path)
    found = list(located_rows(path, ("prompt", "answer"), ()))
    assert [type(row) for row in found] == [tuple, Fault, tuple]
    assert str(found[1]).startswith(f"{path} row 2: a value cannot be read")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[{}, {}", "after row 2: .*array does not end"),
        (b"[{} {}]", "after row 1: a comma is missing"),
        (b"[{}] {}", "after row 1: the array is followed by more"),
        (b"[{}, ]", "after row 2: "),
        (b'{"a": ', "after row 1: "),
        (b'{"a": 1} \xff', "not UTF-8"),
        (b"[" * 100_000, "not readable JSON"),
    ],
)
def test_json_that_is_none_is_one_line(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        rows_of(path)
    assert "\n" not in str(caught.value)


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3)
)
OBJECTS = st.lists(st.dictionaries(st.text(), VALUE, max_size=3), max_size=6)


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans(), st.booleans(), st.integers(1, 40))
def test_values_are_what_json_reads(rows, indent, ascii_only, array, size):
    if array:
        text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    else:
        text = "\r\n".join(json.dumps(row, indent=indent, ensure_ascii=ascii_only) for row in rows)
    content = text.encode("utf-8", "surrogatepass")
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    found = list(lines.value_lines(Path("a.json"), chunks))
    assert [json.loads(each) for each in found] == rows
    assert all(each.count(b"\n") == 1 and each.endswith(b"\n") for each in found)


@given(
    st.lists(
        st.sampled_from([b"{}", b"", b" ", b"\xc2\xa0", b"\xff", b" {}", b"[]", b"\xef\xbb\xbf"])
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.integers(1, 9),
)
def test_places_of_lines_are_those_of_an_obvious_reader(tmp_path_factory, written, end, size):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(end.join(written))
    expected: list[tuple[int, bytes]] = []
    for number, text in enumerate(end.join(written).split(b"\n")):
        try:
            blank = not text.decode("utf-8-sig" if number == 0 else "utf-8").strip()
        except UnicodeDecodeError:
            blank = False
        if not blank:
            expected.append((number + 1, text.strip()))
    content = path.read_bytes()
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    with path.open("rb") as file:
        found = list(lines.LineRows(chunks, file, "a:"))
    assert len(found) == len(expected)
    for row, (number, text) in zip(found, expected, strict=True):
        fine = text.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"") == b"{}"
        assert (row == (f"a:{number}", {})) if fine else isinstance(row, Fault)
        assert isinstance(row, tuple) or row.where == f"a:{number}"


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(io.BytesIO):
        def write(self, *_: Any) -> int:
            raise OSError(28, "No space left on device")

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(ROWS)))
    monkeypatch.setattr(files.tempfile, "TemporaryFile", Full)
    with pytest.raises(ValueError, match=r"No space left .*: set TMPDIR to a folder with room"):
        rows_of(path)
    table_path = tmp_path / "a.parquet"
    table_path.write_bytes(table(ROWS))
    with pytest.raises(ValueError, match=r"No space left .*: set TMPDIR to a folder with room"):
        rows_of(table_path)


@pytest.mark.parametrize(
    "text", ['a\n"open,\nb\nc\n', 'a\nb\n"c', 'a,b\n1,"2"3\n', 'a,b\n1,"2\n3,"4\n']
)
def test_a_quote_that_does_not_close_is_refused(tmp_path: Path, text: str):
    """pyarrow takes the rows behind it for the text of one field."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"a\.csv: .*a quote is not closed well"):
        list(located_rows(path, ("a",), ("a",)))


def test_quotes_within_fields_and_long_fields_are_read(tmp_path: Path):
    path = tmp_path / "a.csv"
    long = "x" * 300_000
    path.write_text(f'a\n5" pipe\n"he said ""so"", and\nleft"\n{long}\n')
    found = [row for _, row in located_rows(path, ("a",), ("a",))]
    assert found == [{"a": '5" pipe'}, {"a": 'he said "so", and\nleft'}, {"a": long}]


@pytest.mark.parametrize("made", ["names", "tables", "pairs"])
def test_a_function_that_returns_no_mappings_says_what_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
):
    lines = (
        "import pyarrow",
        "def names(): return ['prompt']  # what a loop over a DataFrame yields",
        "def tables(): return pyarrow.table({'prompt': ['a']})",
        "def pairs(): return [('prompt', 'a')]",
        "def good(): return [{'prompt': 'a', 3: 'b'}]",
    )
    module = f"rows_of_{made}"
    (tmp_path / f"{module}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"row 1 must be a mapping of columns, got .*to_dict"):
        list(located_rows(Path(f"{module}:{made}"), ("prompt",), ("prompt",)))
    good = Path(f"{module}:good")
    assert data_crc32([good]) == data_crc32([good])


def parts(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(jsonl(ROWS[:1]))
    return folder


ONE_OF_TWO = "a-00000-of-00002.jsonl"
TWO_OF_TWO = "a-00001-of-00002.jsonl"


@pytest.mark.parametrize(
    ("names", "pattern", "words"),
    [
        ([ONE_OF_TWO], "", "lacks a-00001-of-00002.jsonl; 1 of 2 parts are there"),
        ([TWO_OF_TWO], "*.jsonl", "lacks a-00000-of-00002.jsonl; 1 of 2"),
        (["a-00001-of-00003.jsonl", "a-00003-of-00003.jsonl"], "", "lacks a-00002-of-00003.jsonl"),
        ([ONE_OF_TWO], ONE_OF_TWO, None),
        ([ONE_OF_TWO, TWO_OF_TWO], "", None),
        (["a-00001-of-00002.jsonl", "a-00002-of-00002.jsonl"], "", None),
        ([ONE_OF_TWO, "a-00002-of-00003.jsonl"], "a-0000[02]-of-*", "parts of 00002 and of 00003"),
        ([ONE_OF_TWO, "a-00005-of-00007.jsonl"], "a-0000[0]-of-00002*", None),
        ([ONE_OF_TWO, TWO_OF_TWO, "b-00000-of-00002.jsonl"], "", "lacks b-00001-of-00002.jsonl"),
        (["a-00000-of-999999999.jsonl"], "", "1 of 999999999 parts"),
        (["a-00000-of-00001.jsonl", "a.jsonl"], "", None),
    ],
)
def test_parts_that_lack_are_named(
    names: list[str], pattern: str, words: str | None, tmp_path: Path
):
    """Before: a run learned from what had arrived."""
    path = parts(tmp_path / "rows", *names) / pattern
    if words is None:
        assert data_files(path)
        return
    with pytest.raises(ValueError, match=re.escape(words)):
        data_files(path)


def test_a_pointer_to_rows_is_named(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    for path in (tmp_path, tmp_path / "a.parquet", tmp_path / "*.parquet"):
        with pytest.raises(ValueError, match=r"is a git-LFS pointer, .* run `git lfs pull`"):
            data_files(path)
