"""A checkpoint's `.metadata` builds records; whatever else it names is refused before it runs."""

import io
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_opd.checkpoint.megatron_reader import DESCRIPTION, MegatronSource
from megatron_opd.checkpoint.restricted_metadata import (
    METADATA,
    MetadataRefused,
    read_metadata,
    tensors_only,
    unpickle,
)
from megatron_opd.models.spec import read_model_spec
from tests.support.models import tiny_qwen3


class Calls:
    """A pickle of it calls `function` when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def metadata(**fields: Any) -> Metadata:
    """Of one tensor [4, 2] in two pieces and one pickled object."""
    size, half = torch.Size([4, 2]), torch.Size([2, 2])
    pieces = [ChunkStorageMetadata(torch.Size([row, 0]), half) for row in (0, 2)]
    found = {
        "tensors": {
            "weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), size, pieces),
            "weight._extra_state/shard_0_1": BytesStorageMetadata(),
        },
        "places": {
            MetadataIndex("weight", piece.offsets): _StorageInfo(f"__{rank}_0.distcp", 0, 9)
            for rank, piece in enumerate(pieces)
        }
        | {MetadataIndex("weight._extra_state/shard_0_1"): _StorageInfo("__0_0.distcp", 9, 9)},
    } | fields
    meta = StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1", load_id="2")
    return Metadata(found["tensors"], None, found["places"], meta)


def written(directory: Path, value: Any, protocol: int = 4) -> Path:
    (directory / METADATA).write_bytes(pickle.dumps(value, protocol))
    return directory


def read_by_pickle(directory: Path) -> Any:
    """As torch reads it."""
    return pickle.loads((directory / METADATA).read_bytes())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_reads_is_what_we_read(tmp_path: Path, protocol: int) -> None:
    written(tmp_path, metadata(), protocol)
    assert read_metadata(tmp_path) == read_by_pickle(tmp_path) == metadata()


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    state = {f"{dtype}": torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert read_metadata(tmp_path) == read_by_pickle(tmp_path)


def test_a_writer_s_plans_are_records_too(tmp_path: Path) -> None:
    index, half = MetadataIndex("weight", [0, 0]), torch.Size([2, 2])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), half)
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size([4, 2]))
    items = [
        WriteItem(index, WriteItemType.SHARD, tensor_data=data),
        WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(9)),
    ]
    with_plans: Any = metadata()
    with_plans.all_local_plans = [SavePlan(items, storage_data=_StoragePrefix("__0_"))]
    found: Any = read_metadata(written(tmp_path, with_plans))
    assert found == with_plans
    assert found.all_local_plans == with_plans.all_local_plans


def test_what_older_megatron_names_is_read_as_torch_s(tmp_path: Path) -> None:
    """Megatron-Core 0.16 keeps empty classes of these names, to the same end."""
    data = pickle.dumps(metadata(), protocol=2)  # names in plain text, ended by newlines
    ours = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    theirs = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    assert data.count(ours) == 1
    (tmp_path / METADATA).write_bytes(data.replace(ours, theirs))
    assert read_metadata(tmp_path) == metadata()


def run_by(value: Any, marker: Path) -> bool:
    """Whether torch's own way of reading runs the payload: the control of every refusal."""
    pickle.loads(pickle.dumps(value))
    ran = marker.exists()
    marker.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("where", ["alone", "among the tensors", "as a place", "before the record"])
def test_a_payload_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    marker = tmp_path / "ran"
    payload: Any = Calls(os.system, f"touch {marker}")
    tensors, places = metadata().state_dict_metadata, metadata().storage_data
    value = {
        "alone": payload,
        "among the tensors": metadata(tensors={**tensors, "x": payload}),
        "as a place": metadata(places={**places, MetadataIndex("x"): payload}),
        "before the record": (payload, metadata()),
    }[where]
    assert run_by(value, marker)
    written(tmp_path, value)
    with pytest.raises(ValueError, match=r"/\.metadata is refused: it names posix\.system") as told:
        read_metadata(tmp_path)
    assert "\n" not in str(told.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "names",
    [
        b"cbuiltins\neval\n.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch\nload\n.",
        b"ctorch\nserialization.load\n.",
        b"ctorch\nos.system\n.",
        b"ctorch.serialization\nos\n.",
        b"ctorch.distributed.checkpoint.filesystem\npickle\n.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        b"\x80\x02\x82\x01.",  # the extension registry
        b"Psomething\n.",  # a persistent id
    ],
)
def test_names_near_the_allowed_ones_are_not_allowed(names: bytes) -> None:
    with pytest.raises((MetadataRefused, pickle.UnpicklingError, ValueError)):
        unpickle(io.BytesIO(names))


@pytest.mark.parametrize("keeps", [b"r" + struct.pack("<I", 1 << 30), b"p1073741824\n"])
def test_a_few_bytes_do_not_ask_for_gigabytes(keeps: bytes) -> None:
    """Before: Python's reader made an array of 2 ** 31 entries for them."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MetadataRefused, match="keeps a value as number 1073741824"):
        unpickle(io.BytesIO(b"\x80\x04N" + keeps + b"."))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 1 << 20
    assert unpickle(io.BytesIO(b"\x80\x02Nr\x07\0\0\0.")) is None


RECORDS = b"ctorch.distributed.checkpoint.metadata\n"
PATHS = b"cpathlib\n"


def sets(named: bytes, attribute: str, value: bytes) -> bytes:
    """A pickle that names something and sets an attribute of it."""
    name = attribute.encode()
    return b"\x80\x04" + named + b"N}X" + struct.pack("<I", len(name)) + name + value + b"s\x86b."


@pytest.mark.parametrize(
    ("pickled", "thing", "said"),
    [
        (sets(RECORDS + b"MetadataIndex\n", "__hash__", b"N"), MetadataIndex, "__hash__ of Meta"),
        (sets(RECORDS + b"Metadata\n", "__setstate__", b"K\x01"), Metadata, "__setstate__ of M"),
        (sets(PATHS + b"PosixPath\n", "parent", b"K\x01"), PosixPath, "parent of PosixPath"),
        (
            sets(RECORDS + b"_MEM_FORMAT_ENCODING\nK\x00\x85R", "_value_", b"K\x09"),
            _MEM_FORMAT_ENCODING(0),
            "_value_ of",
        ),
    ],
)
def test_a_pickle_that_changes_a_class_leaves_it_as_it_was(
    tmp_path: Path, pickled: bytes, thing: Any, said: str
) -> None:
    before = dict(vars(thing))
    (tmp_path / METADATA).write_bytes(pickled)
    with pytest.raises(ValueError, match=rf"refused: it sets {said}.*it was set back"):
        read_metadata(tmp_path)
    assert dict(vars(thing)) == before
    assert read_metadata(written(tmp_path, metadata())) == metadata()


def test_dtypes_are_the_only_names_of_torch_besides_its_size() -> None:
    assert unpickle(io.BytesIO(b"ctorch\nfloat8_e4m3fn\n.")) is torch.float8_e4m3fn
    assert unpickle(io.BytesIO(b"ctorch\nSize\n.")) is torch.Size
    for name in (b"compile", b"hub", b"Tensor", b"os", b"nothing_of_the_kind"):
        with pytest.raises(MetadataRefused, match=rf"names torch\.{name.decode()}, which"):
            unpickle(io.BytesIO(b"ctorch\n" + name + b"\n."))


def tensor(size: list[int], *pieces: tuple[list[int], list[int]]) -> dict[str, Any]:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in pieces]
    return {"weight": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)}


BROKEN: Any = TensorStorageMetadata(TensorProperties(), torch.Size([2]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1], "it holds a list"),
        (metadata(tensors={"weight": torch.Size([1])}), "'weight' is a Size"),
        (metadata(tensors={"a\x1b[2J": 3}), r"'a\x1b[2J' is a int"),
        (metadata(tensors={3: BytesStorageMetadata()}), "the name 3 is a int"),
        (metadata(tensors=tensor([4], ([0], [2]))), "pieces of weight hold 2 of 4 elements"),
        # two pieces twice, and two rows that nothing holds: the count alone is right
        (metadata(tensors=tensor([4], ([0], [2]), ([1], [2]))), "two pieces of weight overlap"),
        (metadata(tensors=tensor([4], ([2], [4]))), "a piece of weight lies outside of it"),
        (metadata(tensors=tensor([4], ([-1], [4]))), "a piece of weight lies outside of it"),
        (metadata(tensors={"weight": BROKEN}), "TypeError"),
        (metadata(places=None), "AttributeError"),
        (metadata(places={}), "a piece of weight is described, or placed in a file, alone"),
        (
            metadata(tensors={}),
            "a piece of weight is described, or placed in a file, alone",
        ),
        (
            metadata(places={MetadataIndex("weight", [0, 0]): _StorageInfo("__0_0.distcp", -1, 1)}),
            "weight lies at (-1, 1) in its file",
        ),
        (
            metadata(places={MetadataIndex("weight"): _StorageInfo("__0_0.distcp", 2**63, 1)}),
            f"weight lies at ({2**63}, 1) in its file",
        ),
        *(
            (
                metadata(places={MetadataIndex("weight"): _StorageInfo(name, 0, 1)}),
                f"weight lies in '{name}', not in a file of its directory",
            )
            for name in ("../secret", "/etc/passwd", "..", "")
        ),
    ],
)
def test_records_that_make_no_checkpoint_are_refused(tmp_path: Path, value: Any, said: str) -> None:
    written(tmp_path, value)
    with pytest.raises(ValueError, match="does not describe a checkpoint") as told:
        read_metadata(tmp_path)
    assert f"{tmp_path / METADATA} does not describe a checkpoint: {said}" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("damage", [lambda b: b[:40], lambda b: b"", lambda b: b"\xff" + b[1:]])
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = written(tmp_path, metadata()) / METADATA
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="cannot read") as told:
        read_metadata(tmp_path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_pickled_objects_are_left_out(tmp_path: Path) -> None:
    """Torch would read them without restriction wherever a tensor of that name is asked for."""
    kept = tensors_only(read_metadata(written(tmp_path, metadata())))
    assert list(kept.state_dict_metadata) == ["weight"]
    assert {index.fqn for index in kept.storage_data} == {"weight"}
    assert kept.state_dict_metadata["weight"] == metadata().state_dict_metadata["weight"]


def test_the_converter_refuses_a_payload(tmp_path: Path) -> None:
    spec, marker = read_model_spec(tiny_qwen3(tmp_path / "model", seed=1)), tmp_path / "ran"
    payload = Calls(os.system, f"touch {marker}")
    (tmp_path / DESCRIPTION).write_text("{}")
    written(tmp_path, payload)
    with pytest.raises(ValueError, match=r"names posix\.system"):
        MegatronSource(tmp_path, spec)
    assert not marker.exists()
