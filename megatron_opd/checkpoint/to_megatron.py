"""Converts Hugging Face checkpoints to Megatron distributed checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_opd.checkpoint.carried import (
    CARRIED,
    carried_bytes,
    carried_tensors,
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
    run,
)
from megatron_opd.checkpoint.crew import Crew
from megatron_opd.checkpoint.description import copy_description
from megatron_opd.checkpoint.hf_files import check_tensors, file_tensors
from megatron_opd.checkpoint.hf_reader import SafetensorsSource, converted_dtype
from megatron_opd.checkpoint.hf_writer import write_safetensors
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.checkpoint.megatron_writer import Target, finish, write_unit
from megatron_opd.checkpoint.part_dir import PartDir
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.keys import Key, row_of
from megatron_opd.models.spec import ModelSpec, read_model_spec
from megatron_opd.models.tensors import hf_shapes, model_keys

# Size of a Megatron file; torch's writer holds in memory the tensors of the file it writes.
UNIT_BYTES = 256 * 2**20


def hf_to_megatron(
    source: Path,
    target: Path,
    *,
    parallel: ParallelConfig,
    dtype: torch.dtype | None,
    crew: Crew,
    unit_bytes: int = UNIT_BYTES,
) -> ConversionReport:
    """Write the Hugging Face checkpoint `source` as a Megatron distributed checkpoint.

    It loads at any layout; a rank of the layout `parallel` finds its pieces cut and in files of
    their own. dtype: None keeps each tensor's, and makes bfloat16 of a quantised checkpoint. What
    no text goes through is kept beside the model, see carried. ValueError, one line: the source is
    not whole or not of a known architecture, the target exists, the disk is full.
    """
    dtype = converted_dtype(source, dtype)
    spec = read_model_spec(source)
    spec.check_parallel(parallel)
    tensors = SafetensorsSource(source, spec)
    check_tensors(tensors.tensors, spec, source)
    carried = carried_tensors(source, spec)
    keys = list(model_keys(spec))
    sizes = {
        key: bytes_of(
            spec,
            key,
            cast_to(spec, key, dtype) or tensors.dtype_of(next(iter(hf_shapes(spec, key)))),
        )
        for key in keys
    }
    homes = [_home(spec, parallel, key) for key in keys]
    units = list(grouped(keys, sizes.values(), homes, unit_bytes))
    options = {"parallel": parallel.model_dump(), "unit_bytes": unit_bytes}
    part = PartDir(target, plan_of(source, dtype, **options))
    described = Target(spec, parallel, dtype)
    written: list[MegatronSource] = []  # opened once, when the units are complete

    def complete(records: list[Record]) -> None:
        finish(part.path, records[: len(units)])
        listed = {name: entry for record in records for name, entry in record["tensors"].items()}
        (part.path / CHECKSUMS).write_text(json.dumps(listed, indent=0) + "\n", encoding="utf-8")
        copy_description(source, part.path, dtype)

    def write(unit: int) -> Record:
        if unit < len(units):
            return write_unit(part.path, unit, units[unit], tensors, described)
        return {
            "tensors": write_safetensors(
                part.path / CARRIED, layout_of(carried), read_carried(carried)
            )
        }

    def read_back(unit: int, _: Record) -> Iterator[tuple[str, torch.Tensor]]:
        if unit == len(units):
            yield from read_carried(file_tensors(part.path / CARRIED))
            return
        if not written:
            written.append(MegatronSource(part.path, spec))
        for key in units[unit]:
            yield from written[0].hf_tensors(key).items()

    unit_sizes = [sum(sizes[key] for key in unit) for unit in units]
    if carried:
        unit_sizes.append(carried_bytes(carried))
    return run(ConversionJob(part, tuple(unit_sizes), write, complete, read_back), crew)


def _home(spec: ModelSpec, parallel: ParallelConfig, key: Key) -> int:
    """Return which pipeline stage and expert-parallel rank need the parameter: its file is theirs.

    Interleaved stages take turns: chunk c of pp * vpp is on stage c % pp.
    """
    layers = spec.num_layers // (parallel.pp * parallel.vpp)
    experts = max(1, spec.num_experts // parallel.ep)
    if key.layer >= 0:
        stage = key.layer // layers % parallel.pp
    else:
        first = row_of(spec.family, key).mcore[0].startswith("embedding.")
        stage = 0 if first else parallel.pp - 1
    return stage * parallel.ep + max(0, key.expert) // experts
