"""Directories that the library `datasets` writes, made by hand as save_to_disk makes them."""

import json

import pyarrow
import pytest

from megatron_opd.data.files import data_crc32
from megatron_opd.data.records import Columns, read_records, scan_records


def saved(path, *parts, **state):
    """A data set of these rows, one arrow file each part."""
    path.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table)
    (path / "dataset_info.json").write_text("{}")
    files = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (path / "state.json").write_text(json.dumps({**files, **state}))
    return path


def test_rows_of_all_files_are_numbered_through(tmp_path):
    path = saved(
        tmp_path / "set", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}], [{"prompt": "c"}]
    )
    assert [row["prompt"] for row in read_records(path, ["prompt"])] == ["a", "b", "c"]
    where = [row[0] for row in scan_records(path, Columns(("prompt",)))]
    assert where == [f"{path} row {n}" for n in (1, 2, 3)]


def test_messages_and_columns_that_some_rows_lack(tmp_path):
    chat = [{"role": "user", "content": "q"}]
    path = saved(tmp_path / "set", [{"prompt": chat, "id": 3}, {"prompt": chat, "id": None}])
    found = [row for _, row in scan_records(path, Columns(chats=("prompt",), names=("id",)))]
    assert [row["id"] for row in found] == ["3", None]
    assert [row["prompt"][0].content for row in found] == ["q", "q"]


def test_a_dictionary_of_splits_asks_for_one(tmp_path):
    saved(tmp_path / "both" / "train", [{"prompt": "a"}])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ValueError, match=r"both holds the splits 'train', 'test': name one of them"
    ):
        read_records(tmp_path / "both", ["prompt"])
    assert read_records(tmp_path / "both" / "train", ["prompt"]) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ('{"_data_files": [{"filename": "../a.arrow"}]}', "lie in the directory, got '../a.arrow'"),
        ('{"_data_files": [{"filename": "/etc/passwd"}]}', "lie in the directory, got '/etc/pas"),
        ('{"_data_files": [{"filename": ".."}]}', "lie in the directory, got '..'"),
        ('{"_data_files": ["a.arrow"]}', "lie in the directory, got None"),
        ('{"_data_files": [{"filename": "b.arrow"}]}', "data file not found: .*b.arrow"),
        ('{"_data_files": 3}', "must list _data_files, got 3"),
        ("{}", "must list _data_files, got None"),
        ("[]", "state.json must be a JSON object, got list"),
        ("{", "state.json cannot be read"),
        ('{"_indices_files": [{"filename": "i"}]}', r"save it again after flatten_indices\(\)"),
        ('{"_data_files": []}', "set holds no rows"),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(tmp_path, state, words):
    saved(tmp_path / "elsewhere", [{"prompt": "stolen"}])
    (tmp_path / "elsewhere" / "data-00000-of-00001.arrow").rename(tmp_path / "a.arrow")
    path = saved(tmp_path / "set", [{"prompt": "a"}])
    (path / "state.json").write_text(state)
    with pytest.raises(ValueError, match=words) as caught:
        read_records(path, ["prompt"])
    assert "\n" not in str(caught.value)


def test_damaged_arrow_files_and_missing_columns(tmp_path):
    path = saved(tmp_path / "set", [{"prompt": "a"}])
    with pytest.raises(ValueError, match="missing column 'gold'; the columns are 'prompt'"):
        read_records(path, ["gold"])
    file = path / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for content in (b"", b"ARROW1", whole[: len(whole) // 2], whole[:-8], b"x" + whole[1:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not a readable arrow file") as caught:
            read_records(path, ["prompt"])
        assert "\n" not in str(caught.value)


def test_the_checksum_is_that_of_the_rows(tmp_path):
    one, same, other = (
        saved(tmp_path / name, [{"prompt": text}])
        for name, text in (("1", "a"), ("2", "a"), ("3", "b"))
    )
    (same / "cache-123.arrow").write_bytes(b"of the library's own")
    assert data_crc32([one]) == data_crc32([same]) != data_crc32([other])
