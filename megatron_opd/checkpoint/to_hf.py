"""Converts Megatron distributed checkpoints to Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from megatron_opd.checkpoint.carried import (
    carried_bytes,
    carried_tensors,
    carried_units,
    layout_of,
    read_carried,
)
from megatron_opd.checkpoint.conversion import (
    CHECKSUMS,
    ConversionJob,
    ConversionReport,
    Record,
    bytes_of,
    cast_to,
    grouped,
    plan_of,
    require_same,
    run,
)
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.description import CONFIG, copy_description, put_template
from megatron_opd.checkpoint.hf_files import INDEX, SINGLE, file_tensors
from megatron_opd.checkpoint.hf_reader import read_whole
from megatron_opd.checkpoint.hf_writer import Layout, write_safetensors
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.checkpoint.packing import packed
from megatron_opd.checkpoint.part_dir import PartDir
from megatron_opd.config.wording import shown
from megatron_opd.data.end_tokens import name_end_tokens
from megatron_opd.models.families.keys import Key
from megatron_opd.models.places import file_groups, places
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.models.tensors import hf_shapes

MAX_FILE_BYTES = 4 * 2**30
NOT_OF_WEIGHTS = ("initializer_range", "max_position")
"""Fields of a model's description that may be changed without making another model of it."""
HEADS_UNSTATED = (
    "holds nothing that tells its attention heads, which shapes do not: they are those of"
)


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None,
    crew: Crew,
    model: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    chat_template: str | None = None,
    end_ids: tuple[int, ...] = (),
) -> ConversionReport:
    """Write a Megatron distributed checkpoint as a Hugging Face checkpoint, with its tensor names.

    model: where config.json and the tokenizer are; None: in the source itself. chat_template: in
    place of the tokenizer's. end_ids: named in generation_config.json besides. Where the source
    holds checksums of the tensors that it was made of, they are compared. dtype: None keeps each
    tensor's, as what no text goes through always does; where the source has none of that, it is
    taken from `model`. ValueError, one line: the source is damaged or of another model, or holds
    what the model has no place for, the target exists, the disk is full.
    """
    model = source if model is None else model
    spec = read_model_spec(model)
    stored = MegatronSource(source, spec)
    keys = stored.checked_keys()
    _check_own_config(source, model, spec)
    kind_of = {key: cast_to(spec, key, dtype) or stored.dtype_of(key) for key in keys}
    sizes = {key: bytes_of(spec, key, kind) for key, kind in kind_of.items()}
    where, units = places(spec), _units(spec, sizes, max_file_bytes)
    options = {"model": str(model.resolve()), "max_file_bytes": max_file_bytes}
    options |= {"chat_template": chat_template, "end_ids": list(end_ids)}
    part = PartDir(target, plan_of(source, dtype, **options))
    checksums = _read_checksums(source)
    carried = carried_tensors(source, spec) or carried_tensors(model, spec)
    further = carried_units(carried, max_file_bytes)
    unit_sizes = [sum(sizes[key] for key in unit) for unit in units]
    unit_sizes += [carried_bytes(unit) for unit in further]

    def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in checksums:
            require_same(name, tensor, checksums[name], source)
        return tensor

    def of_unit(unit: int) -> tuple[Layout, Iterator[tuple[str, torch.Tensor]]]:
        if unit >= len(units):
            held = further[unit - len(units)]
            return layout_of(held), ((n, checked(n, each)) for n, each in read_carried(held))
        kinds = {name: kind_of[key] for key in units[unit] for name in hf_shapes(spec, key)}
        wanted = {name: where[name] for name in kinds}
        layout = {where[name].name: (kind, where[name].shape) for name, kind in kinds.items()}
        tensors = (
            (name, checked(name, tensor).to(kind_of[key]))
            for key in units[unit]
            for name, tensor in stored.hf_tensors(key).items()
        )
        return layout, packed(tensors, wanted)

    def write(unit: int) -> Record:
        file = SINGLE
        if len(unit_sizes) > 1:
            file = f"model-{unit + 1:05d}-of-{len(unit_sizes):05d}.safetensors"
        return {"file": file, "tensors": write_safetensors(part.path / file, *of_unit(unit))}

    def complete(records: list[Record]) -> None:
        if len(records) > 1:
            _write_index(part.path, records, sum(unit_sizes))
        kinds = set(kind_of.values())
        copy_description(model, part.path, kinds.pop() if len(kinds) == 1 else dtype)
        if chat_template is not None:
            put_template(part.path, chat_template)
        name_end_tokens(part.path, end_ids)

    def read_back(_: int, record: Record) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in file_tensors(part.path / record["file"]).items():
            yield name, read_whole(tensor)

    report = run(ConversionJob(part, tuple(unit_sizes), write, complete, read_back), crew)
    stated = stored.heads_stated or (source / CONFIG).is_file()
    notes = () if stated else (f"{source} {HEADS_UNSTATED} {model / CONFIG}",)
    return replace(report, padding_rows=stored.padding_rows, notes=notes)


def _write_index(path: Path, records: list[Record], total: int) -> None:
    weight_map = {name: r["file"] for r in records for name in r["tensors"]}
    listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")


def _units(spec: ModelSpec, sizes: Mapping[Key, int], limit: int) -> list[tuple[Key, ...]]:
    """Return the parameters of each file, of at most `limit` bytes or one larger tensor."""
    groups = file_groups(spec, sizes)
    totals = [sum(sizes[key] for key in group) for group in groups]
    units = grouped(groups, totals, [0] * len(groups), limit)
    return [tuple(key for group in unit for key in group) for unit in units]


def _check_own_config(source: Path, model: Path, spec: ModelSpec) -> None:
    """Raise ValueError where the source's own config.json, if it has one, is of another model.

    Shapes do not tell: other heads of the same features, or a smaller vocabulary with padding,
    would cut the tensors otherwise, and other rotary settings make another model of them.
    """
    if model == source or not (source / CONFIG).is_file():
        return
    own = read_model_spec(source)
    for each in fields(ModelSpec):
        here, given = getattr(own, each.name), getattr(spec, each.name)
        if here != given and each.name not in NOT_OF_WEIGHTS:
            raise ValueError(
                f"{model / CONFIG} describes another model than {source / CONFIG} does: "
                f"{each.name} is {shown(given)} there and {shown(here)} here; leave out "
                "--model, or correct one"
            )


def _read_checksums(source: Path) -> dict[str, Any]:
    file = source / CHECKSUMS
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"cannot read {file}: {error!r}") from None
