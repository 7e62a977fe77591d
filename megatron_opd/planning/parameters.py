"""Parameters of a model, and of one learner rank, counted from its family's table.

Invariant: a rank's count equals the number of elements that Megatron holds there (checked against
built models at several layouts), because the table that says how weights are cut is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_opd.checkpoint.model_spec import ModelSpec
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.weight_sync.names import Row

# Elements of a Hugging Face tensor by the end of its name; of one expert where there are several.
SIZES: dict[str, Callable[[ModelSpec], int]] = {
    **dict.fromkeys(
        ("embed_tokens.weight", "lm_head.weight"), lambda s: s.vocab_size * s.hidden_size
    ),
    "norm.weight": lambda s: s.hidden_size,
    "layernorm.weight": lambda s: s.hidden_size,
    "q_norm.weight": lambda s: s.head_dim,
    "k_norm.weight": lambda s: s.head_dim,
    "q_proj.weight": lambda s: s.num_heads * s.head_dim * s.hidden_size,
    "k_proj.weight": lambda s: s.num_kv_heads * s.head_dim * s.hidden_size,
    "v_proj.weight": lambda s: s.num_kv_heads * s.head_dim * s.hidden_size,
    "o_proj.weight": lambda s: s.num_heads * s.head_dim * s.hidden_size,
    "q_proj.bias": lambda s: s.num_heads * s.head_dim,
    "k_proj.bias": lambda s: s.num_kv_heads * s.head_dim,
    "v_proj.bias": lambda s: s.num_kv_heads * s.head_dim,
    "mlp.gate_proj.weight": lambda s: s.ffn_size * s.hidden_size,
    "mlp.up_proj.weight": lambda s: s.ffn_size * s.hidden_size,
    "mlp.down_proj.weight": lambda s: s.ffn_size * s.hidden_size,
    "mlp.gate.weight": lambda s: s.num_experts * s.hidden_size,
    "block_sparse_moe.gate.weight": lambda s: s.num_experts * s.hidden_size,
    **dict.fromkeys(
        (
            f"{{e}}.{name}.weight"
            for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
        ),
        lambda s: s.expert_ffn_size * s.hidden_size,
    ),
}
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements. dense: replicated over data- and context-parallel ranks.

    expert: of experts, replicated over expert-data-parallel ranks.
    """

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)


def tensor_size(name: str, spec: ModelSpec) -> int:
    """Elements of the Hugging Face tensor `name`. KeyError: a tensor no size is known of."""
    for ending in sorted(SIZES, key=len, reverse=True):
        if name.endswith(ending):
            return SIZES[ending](spec)
    raise KeyError(f"no size is known of the tensor {name}")


def layer_rows(spec: ModelSpec, layer: int) -> Iterator[Row]:
    """The rows of the family's table that layer `layer` holds."""
    moe = bool(spec.moe_layers) and spec.moe_layers[layer]
    for row in spec.family.layer:
        sparse = row.expert or any(name.endswith(ROUTERS) for name in row.hf)
        feed_forward = any("mlp." in name or "block_sparse_moe." in name for name in row.hf)
        if not feed_forward or sparse == moe:
            yield row


def model_parameters(spec: ModelSpec) -> Parameters:
    """Of the whole model; tied weights once."""
    return _sum(spec, ParallelConfig(), range(spec.num_layers), first=True, last=True)


def active_parameters(spec: ModelSpec) -> int:
    """Those that one token's forward pass uses: the chosen experts and everything dense."""
    whole = model_parameters(spec)
    if not spec.num_experts:
        return whole.total
    return whole.dense + whole.expert * spec.experts_per_token // spec.num_experts


def rank_parameters(
    spec: ModelSpec, parallel: ParallelConfig, stage: int, chunks: Sequence[range]
) -> Parameters:
    """Of one learner rank of pipeline stage `stage`, which holds `chunks` of layers.

    The last stage has its own copy of a tied head.
    """
    layers = [layer for chunk in chunks for layer in chunk]
    return _sum(spec, parallel, layers, first=stage == 0, last=stage == parallel.pp - 1)


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
        for row in layer_rows(spec, layer):
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
    size = sum(tensor_size(name, spec) for name in row.hf)
    if row.expert:
        cut = parallel.expert_tp if row.dim is not None else 1
        return Parameters(expert=size // cut * (spec.num_experts // parallel.ep))
    if size == spec.vocab_size * spec.hidden_size and row in spec.family.top:
        # padded: every rank holds whole rows
        return Parameters(dense=-(-spec.vocab_size // parallel.tp) * spec.hidden_size)
    return Parameters(dense=size if row.dim is None else size // parallel.tp)
