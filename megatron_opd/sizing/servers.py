"""Plans the memory of one GPU of an SGLang server: its share of the weights, and the KV cache.

SGLang's own rule is kept: weights and KV cache together take mem_fraction_static of the GPU, the
rest is for activations and CUDA graphs. Queries, feed-forward features, vocabulary and experts are
split over tp (experts by ep * (tp / ep)), key-value heads too until each rank has one. Latent
attention keeps a latent of keys and values, whole on every rank, and copies of the matrix that
makes both of it. A gated delta net keeps a state of each sequence, in a pool beside that of the
other layers' keys and values. Quantised matrices take a byte a number, and four a row for its
scale; those of a checkpoint that is quantised already take what they take in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.config.servers import ServerConfig
from megatron_opd.sizing.activations import BYTES
from megatron_opd.sizing.learner import GIB
from megatron_opd.sizing.served import ModelSize, Sized, TensorKind, size_of
from sglang_bridge.weights.formats import EXACT, NUMBERS, PLAIN, SCALES, is_quantised, item_bytes

REPLICATED_HEADS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
EMBEDDING = "model.embed_tokens.weight"
COPIED = "kv_b_proj.weight"
"""A matrix of which SGLang computes with a copy (sglang_bridge/server/compat/mla.py)."""
WHOLE = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "shared_expert_gate.weight")
SPLIT_BIASES = ("q_proj.bias", "linear_attn.dt_bias", "linear_attn.A_log")
ROUTERS = ("gate.weight", "router.layer.weight", *WHOLE)
STATES_SHARE = 0.9
"""Memory of states for each byte of the KV pool, SGLang's default of --mamba-full-memory-ratio."""
SPLIT_BY_COLUMNS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")
"""Ends of names of tensors that are split otherwise than a matrix by its rows."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Describes what a server holds on one GPU.

    kv_tokens: tokens that its pool has room for; None: no GPU size is stated. state_bytes: of one
    sequence in layers that keep a state, however long it is, 0 without such layers.
    """

    weights: int
    kv_token_bytes: int
    kv_tokens: int | None
    state_bytes: int = 0

    @property
    def total(self) -> int:
        """Returns the bytes of the weights and the whole KV pool."""
        return self.weights + self.kv_token_bytes * (self.kv_tokens or 0)


def server_memory(model: Sized, section: ServerConfig) -> ServerMemory:
    """Plan a server: its KV pool is max_total_tokens, or what mem_fraction_static leaves."""
    size = size_of(model)
    weights = weight_bytes(size, section)
    heads = max(1, size.num_kv_heads // section.tp)
    # of latent attention every rank keeps the whole latent
    kept = size.latent_kept or 2 * heads * size.head_dim
    kv = (size.num_layers - size.delta_layers) * kept * BYTES[section.dtype]
    state = 0
    if size.delta_net is not None:
        state = size.delta_layers * size.delta_net.state_bytes(section.tp, BYTES[section.dtype])
    tokens = section.max_total_tokens
    if tokens is None and section.gpu_memory_gib is not None:
        room = max(0, _limit(section, section.gpu_memory_gib) - weights)
        tokens = int(room / (1 + STATES_SHARE if state else 1)) // kv
    return ServerMemory(weights, kv, tokens, state)


def weight_bytes(model: Sized, section: ServerConfig) -> int:
    """Count the bytes of the weights on one rank of a server."""
    size, sizes, total = size_of(model), item_bytes(section.dtype), 0
    for kind in size.tensors:
        held = kind.elements // _ranks(kind, size, section)
        held *= 2 if kind.name.endswith(COPIED) else 1
        quantised = section.quantization is not None and is_quantised(kind.name, len(kind.shape))
        if kind.bits is not None:
            total += int(held * kind.bits) // 8
        elif not quantised:
            total += held * sizes[EXACT if kind.exact else PLAIN]
        else:
            total += held * sizes[NUMBERS]
            # ranks that hold some columns of every row hold the scales of all rows
            cut_rows = _ranks(kind, size, section)
            if kind.name.endswith(SPLIT_BY_COLUMNS):
                cut_rows = section.ep if kind.is_expert else 1
            total += kind.shape[0] * kind.count // cut_rows * sizes[SCALES]
    return total


def _ranks(kind: TensorKind, size: ModelSize, section: ServerConfig) -> int:
    """Return over how many ranks a tensor is split."""
    if kind.name.endswith(REPLICATED_HEADS):
        return min(section.tp, size.num_kv_heads)
    if size.whole_embedding and kind.name == EMBEDDING:
        return 1
    split = len(kind.shape) > 1 and not kind.name.endswith(ROUTERS)
    return section.tp if split or kind.name.endswith(SPLIT_BIASES) else 1


def refusal(key: str, model: Sized, section: ServerConfig, context: int) -> str | None:
    """Return a line when `key`.gpu_memory_gib cannot hold weights and KV pool; else None.

    context: tokens that one request may take, which the pool must hold at least.
    """
    if section.gpu_memory_gib is None:
        return None
    memory, limit = server_memory(model, section), _limit(section, section.gpu_memory_gib)
    needed = memory.weights + memory.kv_token_bytes * max(context, section.max_total_tokens or 0)
    needed += memory.state_bytes
    if needed <= limit:
        return None
    return (
        f"{key}.gpu_memory_gib * mem_fraction_static must hold weights and KV cache, got "
        f"{section.gpu_memory_gib:g} * {section.mem_fraction_static:g} = {limit / GIB:.1f} GiB for "
        f"weights {memory.weights / GIB:.1f} + KV {(needed - memory.weights) / GIB:.1f} GiB; "
        f"{_remedy(key, model, section, context, limit)}"
    )


def _limit(section: ServerConfig, gpu_memory_gib: float) -> int:
    return int(gpu_memory_gib * GIB * section.mem_fraction_static)


def _remedy(key: str, model: Sized, section: ServerConfig, context: int, limit: int) -> str:
    size, memory = size_of(model), server_memory(model, section)
    room = (limit - memory.weights) // memory.kv_token_bytes
    if section.max_total_tokens is not None and room >= context:
        return f"{key}.max_total_tokens={room} would fit"
    for tp in (section.tp * factor for factor in (2, 4, 8, 16)):
        if size.num_heads % tp or max(tp, size.num_kv_heads) % min(tp, size.num_kv_heads):
            continue
        wider = server_memory(model, section.model_copy(update={"tp": tp}))
        pool = max(context, section.max_total_tokens or 0)
        if wider.weights + wider.kv_token_bytes * pool <= limit:
            return f"{key}.tp={tp} would fit"
    if room >= 1:
        return f"{key}.context_length={room} would fit"
    return f"no {key}.tp of this model fits"
