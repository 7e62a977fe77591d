"""Describes what a model family is: its parameters, and how its config.json is read. Torch-free.

A row names the parameter inside a layer in both spellings of Megatron-Core (local modules, and
TransformerEngine, which fuses a norm into the linear layer after it) and the Hugging Face tensors
it holds. Their shapes are in models/tensors.py, SGLang's own names in
sglang_bridge/server/pieces.py, and those of what is never quantised in
sglang_bridge/weights/formats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Fusion = Literal["none", "qkv", "gate_up", "delta"]
Layers = Literal["all", "dense", "moe"]
Attention = Literal["all", "full", "delta"]
Window = Literal["none", "limit", "layers"]
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Row:
    """Describes one kind of parameter.

    mcore: its spellings, relative to the layer (or the model, for top-level rows). hf: the tensors
    it holds, relative to the layer, in fusion order. `{e}` stands for the expert: local in `mcore`,
    global in `hf`. dim: the dimension (of the Hugging Face tensors) that tensor parallelism splits;
    None: replicated. fusion: `qkv` interleaves [q.. q k v] per KV group (with an output gate [q..
    gate.. k v]), the others stack sections (models/tensors.py). vocab: dimension 0 is the
    vocabulary, which Megatron pads with rows of zeros. layers: which have the parameter, by their
    feed-forward block; attention: by what mixes positions. exact: servers hold it in float32,
    whatever their dtype. buffer: so does the learner, as a buffer of Megatron's, which no optimizer
    moves.
    """

    mcore: tuple[str, ...]
    hf: tuple[str, ...]
    dim: int | None = None
    fusion: Fusion = "none"
    expert: bool = False
    vocab: bool = False
    layers: Layers = "all"
    attention: Attention = "all"
    exact: bool = False
    buffer: bool = False


_EMBEDDING = Row(
    ("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), 0, vocab=True
)
_FINAL_NORM = Row(("decoder.final_layernorm.weight",), ("model.norm.weight",))
_OUTPUT = Row(("output_layer.weight",), ("lm_head.weight",), 0, vocab=True)
TOP = (_EMBEDDING, _FINAL_NORM, _OUTPUT)


_INPUT_NORM = Row(
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.weight",),
)
PROJECTIONS = (
    Row(
        ("self_attention.linear_qkv.weight",),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        0,
        "qkv",
    ),
    Row(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), 1),
)
_FROM_INPUT = (Row(("self_attention.linear_q_proj.weight",), ("self_attn.q_proj.weight",), 0),)
_FROM_LATENT = (
    # weight_sync/broadcast_sender.py sends it with the one that follows
    Row(("self_attention.linear_q_down_proj.weight",), ("self_attn.q_a_proj.weight",)),
    Row(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attn.q_a_layernorm.weight",),
    ),
    Row(("self_attention.linear_q_up_proj.weight",), ("self_attn.q_b_proj.weight",), 0),
)
LATENT_ATTENTION = (
    Row(("input_layernorm.weight",), ("input_layernorm.weight",)),
    *_FROM_INPUT,
    _FROM_LATENT[0],
    Row(("self_attention.linear_kv_down_proj.weight",), ("self_attn.kv_a_proj_with_mqa.weight",)),
    *_FROM_LATENT[1:],
    Row(
        (
            "self_attention.kv_layernorm.weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
        ("self_attn.kv_a_layernorm.weight",),
    ),
    Row(("self_attention.linear_kv_up_proj.weight",), ("self_attn.kv_b_proj.weight",), 0),
    Row(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), 1),
)
"""With both ways to queries: through a latent of their own, and without one."""
ATTENTION = (_INPUT_NORM, *PROJECTIONS)
QKV_BIAS = Row(
    ("self_attention.linear_qkv.bias",),
    ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    0,
    "qkv",
)
_O_BIAS = Row(("self_attention.linear_proj.bias",), ("self_attn.o_proj.bias",))
BIASES = (QKV_BIAS, _O_BIAS)
KEY_NORM = "self_attention.k_layernorm.weight"
QK_NORM = (
    Row(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Row((KEY_NORM,), ("self_attn.k_norm.weight",)),
)

DELTA_NORM = "self_attention.in_proj.layer_norm_weight"
_DELTA = "linear_attn."
GATED_NORM = f"{_DELTA}norm.weight"
"""A norm that multiplies by its weight whatever Family.zero_centred_norms says."""
_DELTA_NET = (
    Row(
        ("self_attention.in_proj.weight",),
        tuple(f"{_DELTA}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        0,
        "delta",
    ),
    Row(("self_attention.conv1d.weight",), (f"{_DELTA}conv1d.weight",), 0, "delta"),
    Row(("self_attention.dt_bias",), (f"{_DELTA}dt_bias",), 0),
    Row(("self_attention.A_log",), (f"{_DELTA}A_log",), 0, exact=True),
    Row(("self_attention.out_norm.weight",), (GATED_NORM,)),
    Row(("self_attention.out_proj.weight",), (f"{_DELTA}out_proj.weight",), 1),
)
MIXED_ATTENTION = (
    replace(_INPUT_NORM, mcore=(*_INPUT_NORM.mcore, DELTA_NORM)),
    *(replace(row, attention="full") for row in (*PROJECTIONS, *QK_NORM)),
    *(replace(row, attention="delta") for row in _DELTA_NET),
)
"""Attention with normed queries and keys in some layers, a gated delta net in the others."""
POST_NORM = Row(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ("post_attention_layernorm.weight",),
)
ADDED_NORMS = (
    Row(("self_attn_bda.norm.weight",), ("post_attention_layernorm.weight",)),
    Row(("mlp_bda.norm.weight",), ("post_feedforward_layernorm.weight",)),
)
DENSE_MLP = (
    Row(
        ("mlp.linear_fc1.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        0,
        "gate_up",
        layers="dense",
    ),
    Row(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), 1, layers="dense"),
)


EXPERT_BIAS = "mlp.router.expert_bias"
BLOCK = "block_sparse_moe"
"""What files of Mixtral and MiniMax call the feed-forward block."""
ROUTER_BIAS = "mlp.router.bias"
SINKS = "self_attention.core_attention.softmax_offset"


def bias_row(name: str) -> Row:
    """Return the row of what is added to experts' scores where they are chosen, not weighed."""
    return Row((EXPERT_BIAS,), (name,), layers="moe", exact=True, buffer=True)


def expert_rows(
    router: str, expert: str, gate: str, up: str, down: str, *, exact: bool = False
) -> tuple[Row, ...]:
    """Return the rows of a mixture-of-experts layer, by their Hugging Face names.

    exact: servers hold the router's weights in float32, see Row.
    """
    fc1 = ("mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{e}")
    fc2 = ("mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{e}")
    names = tuple(f"{expert}.{part}.weight" for part in (gate, up))
    return (
        Row(("mlp.router.weight",), (f"{router}.weight",), layers="moe", exact=exact),
        Row(fc1, names, 0, "gate_up", expert=True, layers="moe"),
        Row(fc2, (f"{expert}.{down}.weight",), 1, expert=True, layers="moe"),
    )


SHARED_GATE = "mlp.shared_experts.gate_weight"


def shared_expert_rows(name: str, gate: str | None = None) -> tuple[Row, ...]:
    """Return the rows of the feed-forward block that every token of a layer of experts visits.

    gate: the tensor that weighs its output by a sigmoid; None: the output is added as it is.
    """
    halves = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    rows = (
        Row(("mlp.shared_experts.linear_fc1.weight",), halves, 0, "gate_up", layers="moe"),
        Row(
            ("mlp.shared_experts.linear_fc2.weight",),
            (f"{name}.down_proj.weight",),
            1,
            layers="moe",
        ),
    )
    return rows if gate is None else (*rows, Row((SHARED_GATE,), (gate,), layers="moe"))


@dataclass(frozen=True, slots=True)
class Packed:
    """Describes a tensor of a layer in which a file holds several, all matrices or all vectors.

    name: the file's, relative to the layer. parts: the tensors in it, of Row.hf, in
    the order in which their rows lie. experts: of every expert, along a leading dimension; parts
    then say `{e}`. transposed: matrices lie as [in, out], where nn.Linear has [out, in].
    interleaved: parts, equally high, take turns row by row.
    """

    name: str
    parts: tuple[str, ...]
    experts: bool = False
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Describes an architecture: `top` holds tensors outside the layers, `layer` those inside.

    name: config.json's model_type. architecture: its class in transformers. qk_norm: queries and
    keys are normalised per head, with norms_all_heads over all heads together; split_norms: each
    server's rank holds the weights of its heads alone. pre_norm: norms stand before attention and
    MLP; post_norm: after them, before the sum. qkv_bias: queries, keys and values have a bias;
    o_bias: so has the output projection. moe: it has experts. expert_ffn_key: config.json's key of
    their size. experts_keys: those of their number: the class's own, and one that transformers
    takes for it. sums_topk_to_one: the router always scales the chosen experts' weights to a sum of
    one, which other families' norm_topk_prob tells. end_token: what transformers takes for a
    config.json without eos_token_id. heads_fill_hidden: transformers wants num_attention_heads to
    divide hidden_size. packed: tensors in which published files, and so exports, hold several.

    defaults: what transformers takes for a key that is absent. null is another matter: where it is
    no value of the key, transformers refuses the file. optional_biases: those that attention_bias
    adds. theta: rope_theta where nothing names it.
    allowed: values of keys which learner, transformers and SGLang all read in this family, beside
    those of hf_config.ONE_SIDED. reads: keys of that table of which all of them read every value.
    rope_types: rotary positions that all of them know. rotary_share: default of
    partial_rotary_factor; None: all of them turn every feature of a head, and it is 1.
    rotary_dim: a key of this name counts the features that turn.
    rope_keys: further rotary settings, without effect on text. interleaved: rotary positions turn
    neighbours, not a feature of either half. zero_centred_norms: a norm multiplies by 1 + weight.
    output_gate: the query projection makes a gate of each head's output too. gelu: what gates is
    GELU by its tanh formula, not SiLU. scaled_embedding: embeddings are multiplied by the root of
    hidden_size, and each rank of a server holds them all. window: what
    sliding_window does, nothing; it limits the context, as SGLang ignores it; or layer_types says
    where it is. window_every: of so many layers the last has none, where no key of config.json
    says so. window_theta: rotary positions of windowed layers have settings of their own, and
    this rope_theta where nothing names it. plain_window: they are never scaled. shares_heads:
    ranks of a server may share a key-value head. own_modules: SGLang runs transformers' modules.
    check: raises ValueError for a complete config.json that transformers and SGLang read
    differently. carried: starts of names of tensors that no text goes through, which conversions
    and exports keep; {next} stands for each of the num_nextn_predict_layers after the last.
    """

    name: str
    architecture: str
    layer: tuple[Row, ...]
    qk_norm: bool = False
    norms_all_heads: bool = False
    split_norms: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    moe: bool = False
    expert_ffn_key: str = "moe_intermediate_size"
    experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    sums_topk_to_one: bool = False
    end_token: int | None = None
    heads_fill_hidden: bool = False
    top: tuple[Row, ...] = TOP
    packed: tuple[Packed, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    optional_biases: tuple[Row, ...] = BIASES
    theta: float = 1e4
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, compare=False)
    reads: frozenset[str] = frozenset()
    rope_types: tuple[str, ...] = ROPE_TYPES
    rotary_share: float | None = None
    rotary_dim: bool = False
    rope_keys: frozenset[str] = frozenset()
    interleaved: bool = False
    zero_centred_norms: bool = False
    output_gate: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    window: Window = "none"
    window_every: int = 4
    window_theta: float | None = None
    plain_window: bool = False
    shares_heads: bool = True
    own_modules: bool = False
    carried: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Any]], None] | None = field(default=None, compare=False)

    @property
    def latent(self) -> bool:
        """Returns whether its attention is latent attention."""
        return _FROM_LATENT[0] in self.layer or _FROM_INPUT[0] in self.layer

    @property
    def has_delta_net(self) -> bool:
        """Returns whether some layers have a gated delta net instead of attention."""
        return any(row.attention == "delta" for row in self.layer)

    @property
    def sigmoid_router(self) -> bool:
        """Returns whether experts are scored by sigmoids and chosen with a bias."""
        return any(row.mcore[0] == EXPERT_BIAS for row in self.layer)

    @property
    def sinks(self) -> bool:
        """Returns whether a softmax of attention also sums over a number of its head."""
        return any(row.mcore[0] == SINKS for row in self.layer)

    @property
    def expert_biases(self) -> bool:
        """Returns whether every linear layer of it has a bias, experts' and routers' too."""
        return any(row.mcore[0] == ROUTER_BIAS for row in self.layer)

    @property
    def shared_gate(self) -> bool:
        """Returns whether a gate weighs the output of the shared experts."""
        return any(row.mcore[0] == SHARED_GATE for row in self.layer)

    def of(self, config: Mapping[str, Any]) -> Family:
        """Return the family with the parameters that this complete config.json asks for."""
        family = self
        if self.latent:
            left = _FROM_LATENT if config["q_lora_rank"] is None else _FROM_INPUT
            family = replace(family, layer=tuple(row for row in family.layer if row not in left))
        if "use_qk_norm" in self.defaults and config["use_qk_norm"]:
            family = replace(family, layer=(*family.layer, *QK_NORM), qk_norm=True)
        if not config.get("attention_bias"):
            return family
        layer, o_bias = (*family.layer, *self.optional_biases), _O_BIAS in self.optional_biases
        return replace(family, layer=layer, qkv_bias=True, o_bias=o_bias)


def published_form(family: Family) -> Family:
    """Return the family as files of a class with a vision tower have it: experts are stacked."""
    stacks = tuple(
        Packed(stack_name(row), row.hf, experts=True) for row in family.layer if row.expert
    )
    return replace(family, packed=stacks)


def stack_name(row: Row) -> str:
    """Return what transformers calls the stack of a row of experts."""
    return f"mlp.experts.{'gate_up_proj' if row.fusion == 'gate_up' else 'down_proj'}"


NEXT_LAYERS = ("model.layers.{next}.",)
"""Layers of multi-token prediction as GLM and DeepSeek publish them."""
COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Defaults of most families. Sizes of the whole model are never assumed: hidden_size,
intermediate_size, vocab_size and the numbers of layers and heads must be written."""
