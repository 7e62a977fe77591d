"""Fills a model's shards from a checkpoint, or from a fresh initialisation.

A rank reads only the slices it owns and casts them on the way in; no rank ever holds the whole
checkpoint. A fresh initialisation depends on tensor name and seed alone: the same weights at every
parallel layout.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_opd.checkpoint.hf_files import check_complete
from megatron_opd.checkpoint.hf_reader import SafetensorsSource
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.models.families.family import GATED_NORM
from megatron_opd.models.ranks import RankPlacement
from megatron_opd.models.shards import Chunks, TensorSource, cut, local_shards
from megatron_opd.models.spec import ModelSpec


class FreshSource:
    """Makes weights before training: norms are by 1, biases 0, all else N(0, initializer_range)."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.std, self.seed = spec.initializer_range, seed
        self.zero_centred = spec.family.zero_centred_norms

    def read(
        self, name: str, shape: tuple[int, ...], dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Return one slice of the tensor that this name and seed always give."""
        if len(shape) == 1:
            by_one = self.zero_centred and name.endswith("norm.weight") and GATED_NORM not in name
            return torch.zeros(length) if by_one or name.endswith("bias") else torch.ones(length)
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        full = torch.empty(shape).normal_(std=self.std, generator=generator)
        return full.narrow(dim, start, length)


def source_of(path: Path, spec: ModelSpec, seed: int | None) -> TensorSource:
    """Open the checkpoint at `path`; without weights there, a fresh initialisation from `seed`.

    ValueError: no weights and no seed, or tensors that are not all of the model's.
    """
    if SafetensorsSource.exists(path):
        source = SafetensorsSource(path, spec)
        check_complete(source.tensors, spec, path)
        return source
    if MegatronSource.exists(path):
        stored = MegatronSource(path, spec)
        stored.checked_keys()
        return stored
    if seed is None:
        raise ValueError(f"checkpoint {path} holds no model.safetensors")
    return FreshSource(spec, seed)


@torch.no_grad()
def load_weights(
    model: Chunks, spec: ModelSpec, world: RankPlacement, source: TensorSource
) -> None:
    """Fill every parameter of this rank, cast to the parameter's dtype. model: see local_shards.

    Call before the optimizer is built: it takes its float32 main parameters from the model.
    ValueError: a tensor is missing, misshapen, or holds NaN or infinity; the last is raised on
    every rank, whichever of them found it.
    """
    bad: list[str] = []
    for shard in local_shards(model, spec, world).values():
        piece = cut(shard, spec, source)
        if not torch.isfinite(piece).all():
            bad += shard.names[:1]
        shard.parameter.copy_(piece)
    found: list[list[str]] = [bad]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, bad)
    named = sorted({name for names in found for name in names})
    if named:
        # one such weight makes every log-prob NaN, which would show updates later
        where = getattr(source, "path", "the checkpoint")
        raise ValueError(
            f"{where}: {len(named)} tensors hold numbers that are not finite, first {named[0]}"
        )
