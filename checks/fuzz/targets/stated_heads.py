"""What a Megatron checkpoint says of its heads, in four forms -> the files that tell them."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import sys
import zipfile
from argparse import Namespace
from io import BytesIO
from pathlib import Path
from random import Random

import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes
from checks.fuzz.places import EXAMPLE, scratch
from checks.fuzz.targets.checkpoint_metadata import MARKER, embedded, program
from megatron_opd.checkpoint.restricted_metadata import METADATA
from megatron_opd.checkpoint.stated_heads import COMMON_STATE, check_heads, heads_of
from megatron_opd.models.spec import read_model_spec

SPEC = read_model_spec(EXAMPLE / "student")
HEADS = heads_of(SPEC)
SETTINGS = {
    "num_attention_heads": HEADS.num_heads,
    "num_query_groups": HEADS.num_kv_heads,
    "kv_channels": HEADS.head_dim,
    "hidden_size": SPEC.hidden_size,
}
OTHERS = SETTINGS | {"num_attention_heads": 2 * HEADS.num_heads}
PICKLES = ("common.pt", METADATA)
NAMES = ("state.json", "run_config.yaml", *PICKLES)
Given = tuple[str, bytes]
"""A file's name and content; with `.metadata` that of the shard that it points to."""


def forms(settings: dict[str, int]) -> list[Given]:
    """The settings as each program writes them; a pickle without the archive around it."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    told = json.dumps({"format": 2, "heads": dict(zip(names, settings.values(), strict=False))})
    model = yaml.safe_dump({"model": settings | {"_target_": "x"}, "train": {"a": 1.5}})
    found = {"args": Namespace(**settings), "iteration": 5}
    pickles = [pickle.dumps(found, protocol) for protocol in range(2, 6)]
    return [
        ("state.json", told.encode()),
        ("run_config.yaml", model.encode()),
        *((name, data) for name in PICKLES for data in pickles),
    ]


SHARD = "__0_0.distcp"
WHOLE = [*forms(SETTINGS), *forms(OTHERS)]
DAMAGED = {
    name: damaged_bytes([data for each, data in WHOLE if each == name], most=3) for name in NAMES
}


def archived(data: bytes) -> bytes:
    """As torch.save writes a pickle."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("common/data.pkl", data)
    return stream.getvalue()


def pointing(length: int) -> Metadata:
    """Metadata of a checkpoint whose shard holds the common state and nothing else."""
    key = f"{COMMON_STATE}shard_0_1"
    places = {MetadataIndex(key): _StorageInfo(SHARD, 0, length)}
    return Metadata({key: BytesStorageMetadata()}, storage_data=places)


def call(given: Given) -> tuple[str, ...]:
    """Read a checkpoint's directory with this file alone; nothing has run and none was imported."""
    name, data = given
    path = scratch() / "heads"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    (path / (SHARD if name == METADATA else name)).write_bytes(data)
    if name == METADATA:
        (path / name).write_bytes(pickle.dumps(pointing(len(data))))
    modules = set(sys.modules)
    try:
        return check_heads(path, SPEC)
    finally:
        new = {each for each in set(sys.modules) - modules if not each.startswith("encodings")}
        if Path(MARKER).exists():
            Path(MARKER).unlink()
            raise AssertionError("the pickle ran a command")
        if new:
            raise AssertionError(f"the pickle imported {min(new)}")


def oracle(given: Given, found: tuple[str, ...]) -> str | None:
    """Only that file tells anything, and other heads are never taken for these."""
    name, data = given
    if found not in ((), (name,)):
        return "another file tells"
    others = {content for each, content in forms(OTHERS) if each == name}
    others |= {archived(content) for content in others}
    return "other heads pass" if data in others else None


def make(rng: Random) -> Given:
    """A file, damaged or whole; of pickles also such as name what no checkpoint needs."""
    name, data = rng.choice(WHOLE)
    if rng.random() < 0.9:
        data = DAMAGED[name](rng)
    if name in PICKLES:
        if rng.random() < 0.5:
            put = b"r" + struct.pack("<I", rng.choice((3, 2**22))) + b"."
            data = rng.choice((program(rng), embedded(rng), data[:-1] + put))
        data = archived(data)
        if rng.random() < 0.1:
            data = damaged_bytes([data])(rng)
    return name, data


TARGET = Target("stated_heads", make, call, (ValueError,), oracle)
