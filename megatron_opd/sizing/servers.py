"""Plans the memory of one GPU of an SGLang server: its share of the weights, and the KV cache.

SGLang's own rule is kept: weights and KV cache together take mem_fraction_static of the GPU, the
rest is for activations and CUDA graphs. Queries, feed-forward features, vocabulary and experts are
split over tp (experts by ep * (tp / ep)), key-value heads too until each rank has one. Quantised
matrices take a byte a number, and four a row for its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megatron_opd.config.servers import ServerConfig
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import layer_rows, row_shapes
from megatron_opd.sizing.activations import BYTES
from megatron_opd.sizing.learner import GIB
from sglang_bridge.weights.formats import NUMBERS, PLAIN, SCALES, is_quantised, item_bytes

REPLICATED_HEADS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Describes what a server holds on one GPU.

    kv_tokens: tokens that its pool has room for; None: no GPU size is stated.
    """

    weights: int
    kv_token_bytes: int
    kv_tokens: int | None

    @property
    def total(self) -> int:
        """Returns the bytes of the weights and the whole KV pool."""
        return self.weights + self.kv_token_bytes * (self.kv_tokens or 0)


def server_memory(spec: ModelSpec, section: ServerConfig) -> ServerMemory:
    """Plan a server: its KV pool is max_total_tokens, or what mem_fraction_static leaves."""
    size = BYTES[section.dtype]
    weights = weight_bytes(spec, section)
    heads = max(1, spec.num_kv_heads // section.tp)
    kv = 2 * spec.num_layers * heads * spec.head_dim * size
    tokens = section.max_total_tokens
    if tokens is None and section.gpu_memory_gib is not None:
        tokens = max(0, _limit(section, section.gpu_memory_gib) - weights) // kv
    return ServerMemory(weights, kv, tokens)


def weight_bytes(spec: ModelSpec, section: ServerConfig) -> int:
    """Count the bytes of the weights on one rank of a server."""
    tp, total = section.tp, 0
    sizes = item_bytes(section.dtype)
    for layer in range(spec.num_layers):
        for _, row in layer_rows(spec, layer):
            for name, shape in zip(row.hf, row_shapes(spec, row), strict=True):
                copies = spec.num_experts if row.expert else 1
                cut = 1 if row.dim is None or row.served_whole else tp
                if name.endswith(REPLICATED_HEADS):
                    cut = min(tp, spec.num_kv_heads)
                if section.quantization is None or not is_quantised(name, len(shape)):
                    total += prod(shape) * copies // cut * sizes[PLAIN]
                    continue
                total += prod(shape) * copies // cut * sizes[NUMBERS]
                # ranks that hold some columns of every row hold the scales of all rows
                cut_rows = cut if row.dim == 0 else section.ep if row.expert else 1
                total += shape[0] * copies // cut_rows * sizes[SCALES]
    for row in spec.family.top:
        if spec.tied and row.hf == ("lm_head.weight",):
            continue
        total += prod(row_shapes(spec, row)[0]) // (1 if row.dim is None else tp) * sizes[PLAIN]
    return total


def refusal(key: str, spec: ModelSpec, section: ServerConfig, context: int) -> str | None:
    """Return a line when `key`.gpu_memory_gib cannot hold weights and KV pool; else None.

    context: tokens that one request may take, which the pool must hold at least.
    """
    if section.gpu_memory_gib is None:
        return None
    memory, limit = server_memory(spec, section), _limit(section, section.gpu_memory_gib)
    needed = memory.weights + memory.kv_token_bytes * max(context, section.max_total_tokens or 0)
    if needed <= limit:
        return None
    return (
        f"{key}.gpu_memory_gib * mem_fraction_static must hold weights and KV cache, got "
        f"{section.gpu_memory_gib:g} * {section.mem_fraction_static:g} = {limit / GIB:.1f} GiB for "
        f"weights {memory.weights / GIB:.1f} + KV {(needed - memory.weights) / GIB:.1f} GiB; "
        f"{_remedy(key, spec, section, context, limit)}"
    )


def _limit(section: ServerConfig, gpu_memory_gib: float) -> int:
    return int(gpu_memory_gib * GIB * section.mem_fraction_static)


def _remedy(key: str, spec: ModelSpec, section: ServerConfig, context: int, limit: int) -> str:
    memory = server_memory(spec, section)
    room = (limit - memory.weights) // memory.kv_token_bytes
    if section.max_total_tokens is not None and room >= context:
        return f"{key}.max_total_tokens={room} would fit"
    for tp in (section.tp * factor for factor in (2, 4, 8, 16)):
        if spec.num_heads % tp or max(tp, spec.num_kv_heads) % min(tp, spec.num_kv_heads):
            continue
        wider = server_memory(spec, section.model_copy(update={"tp": tp}))
        pool = max(context, section.max_total_tokens or 0)
        if wider.weights + wider.kv_token_bytes * pool <= limit:
            return f"{key}.tp={tp} would fit"
    if room >= 1:
        return f"{key}.context_length={room} would fit"
    return f"no {key}.tp of this model fits"
