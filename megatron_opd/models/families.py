"""Maps Megatron parameters to Hugging Face tensors and says how they are cut, per family.

A row names the parameter inside a layer in both spellings of Megatron-Core (local modules, and
TransformerEngine, which fuses a norm into the linear layer after it) and the Hugging Face tensors
it holds. Their shapes are in tensors.py, SGLang's own names in sglang_bridge/server/pieces.py, and
those of what is never quantised in sglang_bridge/weights/formats.py. Torch-free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

Fusion = Literal["none", "qkv", "gate_up"]
Layers = Literal["all", "dense", "moe"]


@dataclass(frozen=True, slots=True)
class Row:
    """Describes one kind of parameter.

    mcore: its spellings, relative to the layer (or the model, for top-level rows). hf: the tensors
    it holds, relative to the layer, in fusion order. `{e}` stands for the expert: local in `mcore`,
    global in `hf`. dim: the dimension (of the Hugging Face tensors) that tensor parallelism splits;
    None: replicated. fusion: `qkv` interleaves [q.. q k v] per KV group, `gate_up` stacks both.
    vocab: dimension 0 is the vocabulary, which Megatron pads with rows of zeros. layers: which have
    the parameter.
    """

    mcore: tuple[str, ...]
    hf: tuple[str, ...]
    dim: int | None = None
    fusion: Fusion = "none"
    expert: bool = False
    vocab: bool = False
    layers: Layers = "all"


_EMBEDDING = Row(
    ("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), 0, vocab=True
)
_FINAL_NORM = Row(("decoder.final_layernorm.weight",), ("model.norm.weight",))
_OUTPUT = Row(("output_layer.weight",), ("lm_head.weight",), 0, vocab=True)
_TOP = (_EMBEDDING, _FINAL_NORM, _OUTPUT)


@dataclass(frozen=True, slots=True)
class Family:
    """Describes an architecture: `top` holds tensors outside the layers, `layer` those inside.

    name: config.json's model_type. architecture: its class in transformers. qk_norm: queries and
    keys are normalised per head. qkv_bias: they and the values have a bias. moe: it has experts.
    expert_ffn_key: config.json's key of their size. sums_topk_to_one: the router always scales the
    chosen experts' weights to a sum of one, which other families' norm_topk_prob tells.
    end_token: what transformers takes for a config.json without eos_token_id.
    """

    name: str
    architecture: str
    layer: tuple[Row, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    moe: bool = False
    expert_ffn_key: str = "moe_intermediate_size"
    sums_topk_to_one: bool = False
    end_token: int | None = None
    top: tuple[Row, ...] = _TOP


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies a parameter of the whole model.

    layer: global, -1 at top level. row: index into the table. expert: global, -1 for none.
    """

    layer: int
    row: int
    expert: int = -1


_ATTENTION = (
    Row(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
    ),
    Row(
        ("self_attention.linear_qkv.weight",),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        0,
        "qkv",
    ),
    Row(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), 1),
)
_QKV_BIAS = Row(
    ("self_attention.linear_qkv.bias",),
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    0,
    "qkv",
)
_QK_NORM = (
    Row(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Row(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
)
_POST_NORM = Row(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("post_attention_layernorm.weight",),
)
_DENSE_MLP = (
    Row(
        ("mlp.linear_fc1.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        0,
        "gate_up",
        layers="dense",
    ),
    Row(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), 1, layers="dense"),
)


def _experts(router: str, expert: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the rows of a mixture-of-experts layer, by their Hugging Face names."""
    fc1 = ("mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{e}")
    fc2 = ("mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{e}")
    names = tuple(f"{expert}.{part}.weight" for part in (gate, up))
    return (
        Row(("mlp.router.weight",), (f"{router}.weight",), layers="moe"),
        Row(fc1, names, 0, "gate_up", expert=True, layers="moe"),
        Row(fc2, (f"{expert}.{down}.weight",), 1, expert=True, layers="moe"),
    )


_QWEN_MOE = _experts("mlp.gate", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_MOE = _experts("block_sparse_moe.gate", "block_sparse_moe.experts.{e}", "w1", "w3", "w2")

LLAMA = Family("llama", "LlamaForCausalLM", (*_ATTENTION, _POST_NORM, *_DENSE_MLP), end_token=2)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (*_ATTENTION, _POST_NORM, *_MIXTRAL_MOE),
    moe=True,
    expert_ffn_key="intermediate_size",
    sums_topk_to_one=True,
    end_token=2,
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*_ATTENTION, _QKV_BIAS, _POST_NORM, *_DENSE_MLP),
    qkv_bias=True,
)
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", (*_ATTENTION, *_QK_NORM, _POST_NORM, *_DENSE_MLP), qk_norm=True
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*_ATTENTION, *_QK_NORM, _POST_NORM, *_QWEN_MOE, *_DENSE_MLP),
    qk_norm=True,
    moe=True,
)

FAMILIES = {family.name: family for family in (LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def family_of(model_type: str) -> Family:
    """Return the table of a config.json's `model_type`; ValueError lists the known ones."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model_type must be one of {known}, got {model_type[:80]!r}")
    return FAMILIES[model_type]


@cache
def _patterns(family: Family) -> tuple[tuple[re.Pattern[str], bool, int], ...]:
    """Return (pattern, inside a layer, row index) of every spelling of every row."""
    found: list[tuple[re.Pattern[str], bool, int]] = []
    for in_layer, rows in ((False, family.top), (True, family.layer)):
        prefix = r"decoder\.layers\.(?P<layer>\d+)\." if in_layer else ""
        for index, row in enumerate(rows):
            for name in row.mcore:
                text = re.escape(name).replace(r"\{e\}", r"(?P<expert>\d+)")
                found.append((re.compile(prefix + text), in_layer, index))
    return tuple(found)


def locate(family: Family, name: str, layer_offset: int, expert_offset: int) -> Key:
    """Return the key of a local Megatron parameter.

    layer_offset, expert_offset: global index of this rank's first layer and expert. Raises
    KeyError: the table lacks the parameter, so that nothing is ever silently left out.
    """
    for pattern, in_layer, row in _patterns(family):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        groups = match.groupdict()
        layer = int(groups["layer"]) + layer_offset if in_layer else -1
        expert = int(groups["expert"]) + expert_offset if groups.get("expert") else -1
        return Key(layer, row, expert)
    raise KeyError(f"no row of the {family.name} table names the Megatron parameter {name!r}")


def row_of(family: Family, key: Key) -> Row:
    """Return the table row of a key."""
    return (family.top if key.layer < 0 else family.layer)[key.row]


def hf_names(family: Family, key: Key) -> tuple[str, ...]:
    """Return the Hugging Face tensors of a key, in fusion order."""
    prefix = "" if key.layer < 0 else f"model.layers.{key.layer}."
    return tuple(prefix + name.replace("{e}", str(key.expert)) for name in row_of(family, key).hf)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Says where transformers 5 holds a checkpoint's tensor in memory, and writes it when told to.

    index: along a leading dimension of experts, None without. part of parts: along the next one.
    """

    name: str
    index: int | None
    part: int = 0
    parts: int = 1


_IN_MEMORY = (
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:gate_proj|w1)\.weight", "gate_up_proj", 0, 2),
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:up_proj|w3)\.weight", "gate_up_proj", 1, 2),
    (r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:down_proj|w2)\.weight", "down_proj", 0, 1),
)
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


def in_memory(name: str) -> InMemory | None:
    """Return the other spelling of a checkpoint's tensor name; None: there is none."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    prefix, rest = found.groups()
    if rest == "block_sparse_moe.gate.weight":
        return InMemory(f"{prefix}mlp.gate.weight", None)
    for pattern, tensor, part, parts in _IN_MEMORY:
        match = re.fullmatch(pattern, rest)
        if match is not None:
            return InMemory(f"{prefix}mlp.experts.{tensor}", int(match[1]), part, parts)
    return None
