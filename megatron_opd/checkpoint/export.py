"""Writes a Hugging Face checkpoint from a stream of full tensors: atomic, in bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_opd.checkpoint.carried import carried_tensors, read_carried
from megatron_opd.checkpoint.description import copy_description, put_template
from megatron_opd.checkpoint.hf_files import check_complete, stored_tensors
from megatron_opd.checkpoint.packing import packed
from megatron_opd.data.end_tokens import name_end_tokens
from megatron_opd.models.places import places
from megatron_opd.models.spec import ModelSpec, read_model_spec

MAX_FILE_BYTES = 4 * 2**30


def export_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    may_name: Callable[[], None] = lambda: None,
    chat_template: str | None = None,
    end_ids: Sequence[int] = (),
) -> None:
    """Write `tensors`, cast to `dtype`, with the configuration and tokenizer of `source`.

    Buffers of the model (families.family.Row) stay in float32. What files of the family hold fused
    is written fused. Tensors of `source` that no text goes through are written as they are.

    `target` appears complete or not at all; an earlier checkpoint there is replaced.
    max_file_bytes: a new safetensors file is begun before one would exceed it. may_name: called
    when all is written; raises when `target` must not appear. chat_template: in place of the
    source's. end_ids: named in its generation_config.json besides those of `source`. ValueError:
    the tensors are not those of a model of `source`'s config.json, no more and no less.
    """
    target = target.absolute()
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    spec = read_model_spec(source)
    own = packed(_cast(tensors, spec, dtype), places(spec))
    kept = read_carried(carried_tensors(source, spec))
    _write_tensors(chain(own, kept), part, max_file_bytes)
    copy_description(source, part, dtype)
    if chat_template is not None:
        put_template(part, chat_template)
    name_end_tokens(part, end_ids)
    try:
        check_complete(stored_tensors(part), read_model_spec(part), target)
        may_name()
    except BaseException:
        shutil.rmtree(part)
        raise
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _cast(
    tensors: Iterable[tuple[str, torch.Tensor]], spec: ModelSpec, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies on the host: the stream may hand out views of live parameters."""
    exact = tuple(name for row in spec.family.layer if row.buffer for name in row.hf)
    for name, tensor in tensors:
        kind = torch.float32 if name.endswith(exact) else dtype
        yield name, tensor.detach().to("cpu", kind, copy=True).contiguous()


def _write_tensors(tensors: Iterator[tuple[str, torch.Tensor]], part: Path, limit: int) -> None:
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes = total = 0

    def flush() -> None:
        file = part / f"part-{len(files)}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes it private; the checkpoint's other files are not
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        size = tensor.nbytes
        if held and held_bytes + size > limit:
            flush()
            held_bytes = 0
        held[name] = tensor
        held_bytes += size
        total += size
    flush()
    if len(files) == 1:
        (part / "part-0.safetensors").rename(part / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (part / f"part-{index}.safetensors").rename(part / file)
        weight_map |= dict.fromkeys(names, file)
    listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (part / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")
