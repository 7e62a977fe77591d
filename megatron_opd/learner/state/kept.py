"""Presents further tensors of the model's shape, such as averages, as sharded tensors.

They are stored beside the weights, each where its weight is: whatever holds a weight at another
layout finds its average there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_opd.models.gather import FullTensors

PREFIX = "optimizer.kept"
"""As the optimizer's values, these belong to training: whoever reads weights leaves them alone."""
Model = Mapping[str, Mapping[str, Any]]
"""Sharded tensors of a model by chunk and name, without pickles (state/model.py)."""


class KeptTensors:
    """Holds tensors in the shape of a model's. live: the model's own. tensors: by name."""

    def __init__(self, live: FullTensors, tensors: Mapping[str, FullTensors]) -> None:
        self._copies = {
            name: {
                shard.parameter: each.shards[key].parameter.detach()
                for key, shard in live.shards.items()
            }
            for name, each in sorted(tensors.items())
        }

    def sharded(self, model: Model) -> dict[str, dict[str, Any]]:
        """Return sharded tensors whose data are the tensors, by name and place in the model."""
        return {name: dict(self._sharded(name, model)) for name in self._copies}

    def _sharded(self, name: str, model: Model) -> Iterator[tuple[str, Any]]:
        for place, entry, held in self._places(name, model):
            # a factory makes its tensors of what it is given
            others = {"dtype": held.dtype} if isinstance(entry, ShardedTensor) else {}
            yield place, replace(entry, key=f"{PREFIX}.{name}.{entry.key}", data=held, **others)

    def _places(self, name: str, model: Model) -> Iterator[tuple[str, Any, torch.Tensor]]:
        copies = self._copies[name]
        for chunk, entries in model.items():
            for weight, entry in entries.items():
                if entry.data in copies:  # all but buffers that are no weights
                    yield f"{chunk}.{weight}", entry, copies[entry.data]

    @torch.no_grad()
    def take_over(self, loaded: Mapping[str, Mapping[str, torch.Tensor]], model: Model) -> None:
        """Copy into the tensors what was loaded for `sharded`. model: as it was before loading."""
        for name in self._copies:
            for place, _, held in self._places(name, model):
                held.copy_(loaded[name][place])
