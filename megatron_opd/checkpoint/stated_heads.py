"""Compares a model's attention heads with those that a Megatron checkpoint was trained with.

Shapes alone do not tell them: queries, keys and values of 8 heads of 8 features lie in tensors as
large as those of 4 heads of 16, and would be cut elsewhere. What tells is written beside the
tensors, by each program in its own way: in the arguments that Megatron-LM pickles, into common.pt
or, since Megatron-Core 0.19, among the shards, in Megatron-Bridge's run_config.yaml, in state.json
of a learner.

Invariant: no pickle runs anything. Whatever it names becomes a class that does nothing.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_opd.checkpoint.restricted_metadata import METADATA, read_metadata
from megatron_opd.checkpoint.state_files import read_json
from megatron_opd.config.plain_yaml import load_plain
from megatron_opd.config.unique_keys import DuplicateKey
from megatron_opd.models.spec import ModelSpec

STATE = "state.json"
COMMON_STATE = "common_state/"
MAX_BYTES = 2**26
"""The most of a file that is read; each is a few kilobytes."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Holds the heads of a layer: of queries, of keys and values; and the features of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """Return them in words."""
        return f"{self.num_heads} heads ({self.num_kv_heads} of keys) of {self.head_dim} features"


def heads_of(spec: ModelSpec) -> Heads:
    """Return the heads of a model's layers."""
    return Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)


def check_heads(path: Path, spec: ModelSpec) -> tuple[str, ...]:
    """Return the files of a checkpoint that tell its heads. ValueError: they are not the model's.

    A file that cannot be read, or says something else than counts, tells nothing.
    """
    wanted = heads_of(spec)
    found = {name: read(path / name) for name, read in _READERS.items() if (path / name).is_file()}
    if not any(found.values()):  # that of a large model takes seconds
        found[METADATA] = _of_shards(path)
    for name, heads in found.items():
        if heads is not None and spec.latent is not None:
            # of latent attention a program's other numbers are those of attention without one
            heads = replace(wanted, num_heads=heads.num_heads)
        if heads not in (None, wanted):
            raise ValueError(
                f"{path / name} says {heads}, the given config.json {wanted}: queries, keys and "
                "values would be cut elsewhere; give the config.json of the model that was saved"
            )
    return tuple(name for name, heads in found.items() if heads is not None)


def _of_learner(path: Path) -> Heads | None:
    try:
        stated = read_json(path).get("heads")
    except ValueError:
        return None
    return _counted(stated, *asdict(Heads(0, 0, 0)))


def _of_bridge(path: Path) -> Heads | None:
    try:
        with path.open(encoding="utf-8") as stream:
            tree = load_plain(stream.read(MAX_BYTES), path.name)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, DuplicateKey):
        return None
    model = cast(dict[str, Any], tree).get("model") if isinstance(tree, dict) else None
    return _of_settings(model)


def _of_shards(path: Path) -> Heads | None:
    try:
        stored = read_metadata(path).storage_data
        (info,) = [each for index, each in stored.items() if index.fqn.startswith(COMMON_STATE)]
        with (path / Path(info.relative_path).name).open("rb") as stream:
            stream.seek(info.offset)
            return _of_megatron(io.BytesIO(stream.read(min(info.length, MAX_BYTES))))
    except Exception:  # noqa: BLE001  damaged metadata hold anything
        return None


def _of_megatron(file: Path | io.BytesIO) -> Heads | None:
    """Read what torch.save wrote of Megatron-LM: a dictionary, or a list of one."""
    try:
        with zipfile.ZipFile(file) as archive:
            (info,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            found = _inert(archive.read(info)) if info.file_size < MAX_BYTES else None
    except Exception:  # noqa: BLE001  a damaged pickle raises anything
        return None
    found = cast(list[Any], found)[0] if isinstance(found, list) and found else found
    arguments = cast(dict[Any, Any], found).get("args") if isinstance(found, dict) else None
    settings = dict(vars(arguments)) if isinstance(arguments, _Anything) else None
    if settings is not None and settings.get("group_query_attention") is False:
        settings["num_query_groups"] = None
    return _of_settings(settings)


def _of_settings(settings: Any) -> Heads | None:
    """Read the settings of a Megatron model, whose absent counts follow from the others."""
    if not isinstance(settings, Mapping):
        return None
    counts = dict(cast(Mapping[str, Any], settings))
    heads, hidden = counts.get("num_attention_heads"), counts.get("hidden_size")
    if counts.get("num_query_groups") is None:
        counts["num_query_groups"] = heads
    if counts.get("kv_channels") is None and type(heads) is int and type(hidden) is int and heads:
        counts["kv_channels"] = hidden // heads
    return _counted(counts, "num_attention_heads", "num_query_groups", "kv_channels")


def _counted(stated: Any, *names: str) -> Heads | None:
    values = (
        [cast(dict[str, Any], stated).get(name) for name in names]
        if isinstance(stated, dict)
        else []
    )
    counts = [value for value in values if type(value) is int and value > 0]
    return Heads(*counts) if len(counts) == len(names) else None


_READERS: Mapping[str, Callable[[Path], Heads | None]] = {
    STATE: _of_learner,
    "run_config.yaml": _of_bridge,
    "common.pt": _of_megatron,
}


def _inert(data: bytes) -> Any:
    """Read a pickle in which every name is a class that does nothing. It raises anything."""
    puts = ("PUT", "BINPUT", "LONG_BINPUT")
    kept = (at or 0 for code, at, _ in pickletools.genops(data) if code.name in puts)
    if any(at >= len(data) for at in kept):  # the reader would make room for as many things
        raise pickle.UnpicklingError("it keeps more than it can hold")
    return _Inert(io.BytesIO(data)).load()


class _Anything:
    """Stands for an instance of a class that a pickle names: it takes attributes and items."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


class _Inert(pickle.Unpickler):
    """Reads a pickle without importing, calling or changing anything that it names."""

    def find_class(self, module: str, name: str, /) -> Any:
        return type("_Anything", (_Anything,), {})

    def persistent_load(self, pid: Any, /) -> None:
        return None
