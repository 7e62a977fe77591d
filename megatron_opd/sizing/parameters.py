"""Counts the parameters of a model, and of one learner rank, from its family's table.

Invariant: a rank's count equals the number of elements that Megatron holds there (checked against
built models at several layouts), because the table that says how weights are cut is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.families.family import Row
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import layer_rows, row_shapes


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts elements. dense: replicated over data- and context-parallel ranks.

    expert: elements of experts, replicated over expert-data-parallel ranks.
    """

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """Returns the sum of dense and expert elements."""
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)


def model_parameters(spec: ModelSpec) -> Parameters:
    """Count the whole model's parameters; tied weights count once."""
    return _sum(spec, ParallelConfig(), range(spec.num_layers), first=True, last=True)


def rank_parameters(
    spec: ModelSpec, parallel: ParallelConfig, stage: int, chunks: Sequence[range]
) -> Parameters:
    """Count those of one learner rank of pipeline stage `stage`, which holds `chunks` of layers.

    The last stage has its own copy of a tied head.
    """
    layers = [layer for chunk in chunks for layer in chunk]
    return _sum(spec, parallel, layers, first=stage == 0, last=stage == parallel.pp - 1)


def average_parameters(spec: ModelSpec, parallel: ParallelConfig) -> tuple[float, float]:
    """Return the dense and the expert elements of a rank of the average stage.

    As if every tensor were cut, and all stages were alike.
    """
    model = model_parameters(spec)
    experts = parallel.expert_tp * parallel.ep
    return model.dense / parallel.tp / parallel.pp, model.expert / experts / parallel.pp


def _sum(
    spec: ModelSpec,
    parallel: ParallelConfig,
    layers: Sequence[int],
    *,
    first: bool,
    last: bool,
) -> Parameters:
    total = Parameters()
    for layer in layers:
        for _, row in layer_rows(spec, layer):
            if not row.buffer:
                total += _row(spec, parallel, row)
    for row in spec.family.top:
        name = row.hf[0]
        embedding, head = name.endswith("embed_tokens.weight"), name == "lm_head.weight"
        held = first if embedding else last
        if head and spec.tied and first:
            held = False  # the embedding itself, on this very rank
        if held:
            total += _row(spec, parallel, row)
    return total


def _row(spec: ModelSpec, parallel: ParallelConfig, row: Row) -> Parameters:
    size = sum(map(prod, row_shapes(spec, row)))
    if row.expert:
        cut = parallel.expert_tp if row.dim is not None else 1
        return Parameters(expert=size // cut * (spec.num_experts // parallel.ep))
    if row.vocab:
        # padded: every rank holds whole rows
        return Parameters(dense=-(-spec.vocab_size // parallel.tp) * spec.hidden_size)
    return Parameters(dense=size if row.dim is None else size // parallel.tp)
