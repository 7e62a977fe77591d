"""Quantises the learner's weights for servers of `student.quantization`: numbers and scales.

A row's scale follows from its largest magnitude over all ranks that hold some of its columns, so
every rank quantises what it holds by itself. Weights are cast to the servers' dtype first, as those
are that a server quantises when it loads a checkpoint: both make the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_opd.models.gather import FullTensors
from megatron_opd.models.shards import Shard
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.views import View, shard_views, views_by_name
from megatron_opd.weight_sync.row_maxima import reader, row_maxima
from sglang_bridge.weights import quantise
from sglang_bridge.weights.exchange import Read
from sglang_bridge.weights.formats import Format, Grid, is_quantised, scales_of


class Quantiser:
    """Quantises what a rank of the learner holds.

    dtype: of the servers' other weights. `views` describes also the scales, which lie in memory
    that `refresh` fills; with `once` those of rows whose columns lie on several ranks are on the
    first of these alone.
    """

    def __init__(
        self,
        full: FullTensors,
        shards: Iterable[Shard],
        format: Format,
        dtype: torch.dtype,
        *,
        once: bool = False,
    ) -> None:
        self._full, self._dtype = full, dtype
        self._format: Format = format
        self._maxima: Mapping[str, torch.Tensor] = {}
        mine = list(shards)
        self.views = views_by_name(mine, full.spec)
        self._scales = [
            (weight, scales)
            for shard in mine
            for weight, scales in _with_scales(shard, full.spec)
            if weight.dim == 0 or shard.index == 0 or not once
        ]
        for _, scales in self._scales:
            self.views.setdefault(scales.name, []).append(scales)

    def refresh(self) -> Read:
        """Make the scales of the current weights; return what reads a slice as servers hold it.

        Collective over the learner's world. A slice of a matrix has whole rows, or all rows of some
        columns; one of anything else is read as it is.
        """
        found = row_maxima(self._full)
        self._maxima = {name: row_max.to(self._dtype) for name, row_max in found.items()}
        with torch.no_grad():
            for weight, scales in self._scales:
                row_max = self._row_max(weight.name, weight.tensor)
                scales.tensor.copy_(quantise.row_scales(row_max, self._format))
        return self._read

    def _read(self, name: str, view: torch.Tensor) -> torch.Tensor:
        if not is_quantised(name, view.dim()):
            return view
        scales = quantise.row_scales(self._row_max(name, view), self._format)
        return quantise.quantised(view.to(self._dtype), scales, self._format)

    def _row_max(self, name: str, view: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitudes of a slice's rows, in the servers' dtype."""
        known = self._maxima.get(name)
        # rounding keeps order: the largest magnitude rounded is the largest of the rounded ones
        return quantise.row_maxima(view).to(self._dtype) if known is None else known


def reader_of_held(
    full: FullTensors, round_to: Grid | None, format: Format | None, dtype: torch.dtype
) -> tuple[dict[str, list[View]], Read]:
    """Return the slices that this rank answers for, and what reads them as servers hold them.

    Collective over the learner's world. Each number of the model, or of its scales, is in the
    slices of exactly one rank.
    """
    owned = list(full.owned())
    if format is None:
        return views_by_name(owned, full.spec), reader(full, round_to)
    quantiser = Quantiser(full, owned, format, dtype, once=True)
    return quantiser.views, quantiser.refresh()


def _with_scales(shard: Shard, spec: ModelSpec) -> list[tuple[View, View]]:
    """Return each matrix of a shard with memory for the scales of its rows."""
    found: list[tuple[View, View]] = []
    for view in shard_views(shard, spec):
        if is_quantised(view.name, view.tensor.dim()):
            rows = view.tensor.shape[0]
            memory = torch.zeros(rows, 1, device=view.tensor.device)
            start = view.start if view.dim == 0 else 0
            found.append((view, View(scales_of(view.name), 0, start, memory)))
    return found
