"""Says which slices of which Hugging Face tensors a rank's parameters hold; digests them.

SGLang fuses q, k, v; gate and up; and all experts. A learner knows only Hugging Face names, so
every fused parameter is taken apart into pieces {name, dim, start, length}: the same list serves
comparing and receiving weights. The scales of a quantised matrix are a tensor [rows, 1] of their
own, split as the matrix's rows are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_bridge import wire
from sglang_bridge.server.compat import delta_net, qk_norm, sinks
from sglang_bridge.weights.digest import as_text, slice_digest
from sglang_bridge.weights.formats import HELD_AS, PLAIN_BYTES, scales_of

KNOWN = frozenset(getattr(torch, name) for name in (*PLAIN_BYTES, *HELD_AS.values()))
UNSPLIT = frozenset({"Glm4MoeGate", "Glm4MoeLiteGate", "MoEGate", "Gemma3TextScaledWordEmbedding"})
"""Names of classes of routers that are no linear layers, and of an embedding that every rank holds
whole; importing them takes seconds."""
WEIGHT, SCALES = "weight", scales_of("weight")
GATE_AND_UP = {f"w13_{WEIGHT}": WEIGHT, f"w13_{SCALES}": SCALES, "w13_weight_bias": "bias"}
"""What stacks gate and up of experts, and what either is called of its own."""
DOWN_BIAS = "w2_weight_bias"
LATENTS = "fused_qkv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes `view`, live memory: [start, start + length) of dim `dim` of `hf_name`."""

    hf_name: str
    dim: int
    start: int
    length: int
    view: torch.Tensor

    @property
    def key(self) -> str:
        """Returns its description on the wire."""
        dtype = str(self.view.dtype).removeprefix("torch.")
        fields = (self.hf_name, self.dim, self.start, self.length, dtype)
        return wire.PIECE_SEPARATOR.join(map(str, fields))

    @property
    def digest(self) -> str:
        """Returns the digest of what it holds now."""
        return self.digest_of(self.view)

    def digest_of(self, values: torch.Tensor) -> str:
        """Returns the digest that it would have with these values."""
        return as_text(slice_digest(values, self.dim, self.start))


def piece_list(model: torch.nn.Module) -> dict[str, str]:
    """Returns {piece key: nothing} of every parameter of this rank."""
    return {piece.key: "" for piece in pieces(model)}


def piece_digests(model: torch.nn.Module) -> dict[str, str]:
    """Returns {piece key: digest} of every parameter of this rank."""
    return {piece.key: piece.digest for piece in pieces(model)}


def model_facts(model: Any, num_ids: int) -> dict[str, str]:
    """Returns what the client asks of a model; text, as the reply carries only text."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"vocab_size": str(num_ids), "dtype": dtype}


def pieces(model: torch.nn.Module) -> list[Piece]:
    """Lists every piece of every parameter; a tied parameter once.

    Raises TypeError for a layout that is not known.
    """
    modules = dict(model.named_modules())
    found: list[Piece] = []
    for name, parameter in model.named_parameters():  # yields a shared parameter once
        if parameter.dtype not in KNOWN:
            raise TypeError(
                f"{name}: {parameter.dtype} (of quantised weights only those of "
                "student.quantization are supported)"
            )
        owner, _, leaf = name.rpartition(".")
        found.extend(pieces_of(modules, owner, leaf, parameter.data))
    return found


def by_name(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """Returns pieces by the name of their tensor, and by a longer one further pieces of it.

    A rank of a gated delta net holds its heads' rows of each of the parts that a tensor stacks.
    """
    found: dict[str, Piece] = {}
    for piece in pieces:
        name = piece.hf_name
        found[name if name not in found else f"{name}[{piece.start}:]"] = piece
    return found


def pieces_of(
    modules: Mapping[str, torch.nn.Module], owner: str, leaf: str, data: torch.Tensor
) -> Iterator[Piece]:
    """Yields the pieces of one parameter, by the kind of layer it belongs to.

    modules: the model's, by name. Hugging Face names tell what SGLang's Qwen3.5 does not: which of
    a layer's own modules are its attention's.
    """
    layer, _, part = owner.rpartition(".")
    inside = type(modules.get(layer)).__name__ == delta_net.ATTENTION_LAYER
    for piece in _own_pieces(modules, owner, leaf, data):
        name = piece.hf_name
        if inside and part in delta_net.OF_ATTENTION:
            name = f"{layer}.self_attn{name.removeprefix(layer)}"
        yield replace(piece, hf_name=name)


def _own_pieces(
    modules: Mapping[str, torch.nn.Module], owner: str, leaf: str, data: torch.Tensor
) -> Iterator[Piece]:
    """Yields them by the names that SGLang's modules have."""
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    module: Any = modules[owner]
    if owner.endswith(delta_net.PROJECTIONS) or owner.endswith(delta_net.CONVOLUTION):
        net = modules[owner.rpartition(".")[0]]
        yield from _sections(module, owner, leaf, delta_net.sections(net, owner), data)
    elif leaf in delta_net.BY_HEAD and hasattr(module, "conv1d"):
        length = data.shape[0]
        yield Piece(f"{owner}.{leaf}", 0, _rank(module.conv1d.tp_group) * length, length, data)
    elif leaf == sinks.PARAMETER:
        length = data.shape[0]
        yield Piece(f"{owner}.{leaf}", 0, _rank(module.qkv_proj.tp_group) * length, length, data)
    elif isinstance(module, linear.QKVParallelLinear):
        yield from _qkv(module, owner, leaf, data)
    elif isinstance(module, linear.MergedColumnParallelLinear):
        yield from _gate_up(module, owner, leaf, data)
    elif isinstance(module, linear.ColumnParallelLinear):  # of a latent, or of transformers
        length = data.shape[0]
        yield Piece(f"{owner}.{leaf}", 0, _rank(module.tp_group) * length, length, data)
    elif owner.endswith(f".{LATENTS}"):
        yield from _latents(modules[owner.rpartition(".")[0]], owner, leaf, data)
    elif isinstance(module, linear.RowParallelLinear) and leaf == WEIGHT:
        length = data.shape[1]
        yield Piece(f"{owner}.{leaf}", 1, _rank(module.tp_group) * length, length, data)
    elif isinstance(module, VocabParallelEmbedding):  # the language-model head is a subclass
        shard = module.shard_indices
        if shard.num_added_elements:
            raise TypeError(f"{owner}: added (LoRA) vocabulary is not supported")
        length = shard.num_org_elements  # rows beyond it are padding
        if length:  # a rank may hold padding alone
            start = shard.org_vocab_start_index
            yield Piece(f"{owner}.{leaf}", 0, start, length, data.narrow(0, 0, length))
    elif type(module).__name__ == qk_norm.NORM:
        start = qk_norm.first(module)
        yield Piece(f"{owner}.{leaf}", 0, start, data.shape[0], data)
    elif isinstance(module, FusedMoE):
        yield from _experts(module, owner, leaf, data)
    elif data.ndim == 1 or _is_whole(module, linear):
        yield Piece(f"{owner}.{leaf}", 0, 0, data.shape[0], data)  # router, norm, bias, scales
    else:
        raise TypeError(f"{owner}.{leaf}: unknown layer {type(module).__name__}")


def _is_whole(module: torch.nn.Module, linear: Any) -> bool:
    """Returns whether each rank holds all of a layer's matrix, or of a row-parallel one's bias."""
    whole = (linear.ReplicatedLinear, linear.RowParallelLinear, torch.nn.Linear)
    return isinstance(module, whole) or type(module).__name__ in UNSPLIT


def _qkv(module: Any, owner: str, leaf: str, data: torch.Tensor) -> Iterator[Piece]:
    """Yields [q of this rank, k, v] stacked; ranks beyond the KV heads hold copies of a head."""
    rank = _rank(module.tp_group)
    kv_rank = _rank(module.kv_tp_group) // module.num_kv_head_replicas
    q, kv = module.q_proj_shard_size, module.kv_proj_shard_size
    offset = 0
    for part, length, shard in (("q", q, rank), ("k", kv, kv_rank), ("v", kv, kv_rank)):
        name = f"{_replace_last(owner, 'qkv_proj', part + '_proj')}.{leaf}"
        yield Piece(name, 0, shard * length, length, data.narrow(0, offset, length))
        offset += length
    _require_whole(owner, offset, data.shape[0])


def _gate_up(module: Any, owner: str, leaf: str, data: torch.Tensor) -> Iterator[Piece]:
    """Yields [gate of this rank, up of this rank] stacked."""
    rank, world = _rank(module.tp_group), _world(module.tp_group)
    offset = 0
    for part, full in zip(("gate_proj", "up_proj"), module.output_sizes, strict=True):
        length = full // world
        name = f"{_replace_last(owner, 'gate_up_proj', part)}.{leaf}"
        yield Piece(name, 0, rank * length, length, data.narrow(0, offset, length))
        offset += length
    _require_whole(owner, offset, data.shape[0])


def _sections(
    module: Any,
    owner: str,
    leaf: str,
    sections: Sequence[tuple[str, int, int]],
    data: torch.Tensor,
) -> Iterator[Piece]:
    """Yields this rank's share of each section (tensor, its first row there, its rows), stacked.

    Those that follow each other in one tensor as they do here are one piece.
    """
    rank, world = _rank(module.tp_group), _world(module.tp_group)
    found: list[tuple[str, int, int, int]] = []
    offset = 0
    for part, first, rows in sections:
        start, length = first + rank * (rows // world), rows // world
        if found and found[-1][0] == part and sum(found[-1][1:3]) == start:
            found[-1] = (part, found[-1][1], found[-1][2] + length, found[-1][3])
        else:
            found.append((part, start, length, offset))
        offset += length
    _require_whole(owner, offset, data.shape[0])
    parent = owner.rpartition(".")[0]
    for part, start, length, at in found:
        yield Piece(f"{parent}.{part}.{leaf}", 0, start, length, data.narrow(0, at, length))


def _latents(attention: Any, owner: str, leaf: str, data: torch.Tensor) -> Iterator[Piece]:
    """Yields [latent of the queries, latent of keys and values] stacked, on every rank alike."""
    rows = attention.q_lora_rank, attention.kv_lora_rank + attention.qk_rope_head_dim
    for part, view in zip(("q_a_proj", "kv_a_proj_with_mqa"), data.split(rows), strict=True):
        name = f"{_replace_last(owner, LATENTS, part)}.{leaf}"
        yield Piece(name, 0, 0, len(view), view)


def _experts(module: Any, owner: str, leaf: str, data: torch.Tensor) -> Iterator[Piece]:
    """Yields [experts of this EP rank, ...]: w13 stacks this rank's gate and up, w2 is down.

    Rows of gate and up take turns where experts have biases (gpt-oss), and the first of the ranks
    that share an expert holds all of the bias of down, the others zeros.
    """
    if module.num_fused_shared_experts:
        raise TypeError(f"{owner}: fused shared experts are not supported")
    _require_plain(module, owner)
    first = module.moe_ep_rank * data.shape[0]
    # Mixtral's and MiniMax's files have names of their own for the three matrices of an expert.
    mixtral = ".block_sparse_moe." in f".{owner}."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for local in range(data.shape[0]):
        base = f"{owner}.{first + local}"
        if leaf in GATE_AND_UP:
            stack, length = data[local], data.shape[1] // 2
            start = module.moe_tp_rank * length
            turns = hasattr(module, "w13_weight_bias")
            views = (stack[0::2], stack[1::2]) if turns else stack.split(length)
            for part, view in zip((gate, up), views, strict=True):
                yield Piece(f"{base}.{part}.{GATE_AND_UP[leaf]}", 0, start, length, view)
        elif leaf == DOWN_BIAS:
            if module.moe_tp_rank == 0:
                yield Piece(f"{base}.{down}.bias", 0, 0, data.shape[1], data[local])
        elif leaf == f"w2_{SCALES}":
            yield Piece(f"{base}.{down}.{SCALES}", 0, 0, data.shape[1], data[local])
        elif leaf == f"w2_{WEIGHT}":
            length = data.shape[2]
            start = module.moe_tp_rank * length
            yield Piece(f"{base}.{down}.{WEIGHT}", 1, start, length, data[local])
        else:
            raise TypeError(f"{owner}.{leaf}: unknown expert parameter")


def _require_plain(module: Any, owner: str) -> None:
    """Refuses experts that SGLang has laid out for other kernels after loading."""
    method = getattr(module, "quant_method", None)
    if getattr(method, "use_triton_kernels", False):
        why = "transposed, start the server with --moe-runner-backend triton"
    elif getattr(method, "use_flashinfer_trtllm_moe", False):
        why = "in blocks, start the server with --moe-runner-backend triton"
    elif getattr(method, "w13_swiglu_interleaved", False):
        why = "with gate and up interleaved, unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    else:
        return
    raise TypeError(f"{owner}: weight syncs cannot write experts that are held {why}")


def _replace_last(owner: str, old: str, new: str) -> str:
    head, found, leaf = owner.rpartition(".")
    if leaf != old:
        raise TypeError(f"{owner}: expected a layer named {old}")
    return f"{head}{found}{new}"


def _require_whole(owner: str, covered: int, rows: int) -> None:
    if covered != rows:
        raise TypeError(f"{owner}: its pieces cover {covered} of {rows} rows")


def _rank(group: Any) -> int:
    from sglang.srt.distributed.utils import get_group_rank_size

    return get_group_rank_size(group)[0]


def _world(group: Any) -> int:
    from sglang.srt.distributed.utils import get_group_rank_size

    return get_group_rank_size(group)[1]
