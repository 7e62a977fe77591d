"""Describes an architecture: its parameters, and how its config.json is read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_opd.models.families.rows import BIASES, TOP, Row


@dataclass(frozen=True, slots=True)
class Family:
    """Describes an architecture: `top` holds tensors outside the layers, `layer` those inside.

    name: config.json's model_type. architecture: its class in transformers. qk_norm: queries and
    keys are normalised per head. qkv_bias: they and the values have a bias; o_bias: so has the
    output projection. moe: it has experts. expert_ffn_key: config.json's key of their size.
    sums_topk_to_one: the router always scales the chosen experts' weights to a sum of one, which
    other families' norm_topk_prob tells. end_token: what transformers takes for a config.json
    without eos_token_id. heads_fill_hidden: transformers wants num_attention_heads to divide
    hidden_size.

    defaults: what transformers takes for a key that is absent. null is another matter: where it is
    no value of the key, transformers refuses the file. theta: rope_theta where nothing names it.
    allowed: values of keys which learner, transformers and SGLang all read in this family, beside
    those of hf_config.ONE_SIDED. rope_types: rotary positions that all of them know.
    """

    name: str
    architecture: str
    layer: tuple[Row, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    moe: bool = False
    expert_ffn_key: str = "moe_intermediate_size"
    sums_topk_to_one: bool = False
    end_token: int | None = None
    heads_fill_hidden: bool = False
    top: tuple[Row, ...] = TOP
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)
    theta: float = 1e4
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, compare=False)
    rope_types: tuple[str, ...] = ("default", "linear", "llama3")

    def of(self, config: Mapping[str, Any]) -> Family:
        """Return the family with the parameters that this complete config.json asks for."""
        if not config.get("attention_bias"):
            return self
        return replace(self, layer=(*self.layer, *BIASES), qkv_bias=True, o_bias=True)


COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Defaults of most families. Sizes of the whole model are never assumed: hidden_size,
intermediate_size, vocab_size and the numbers of layers and heads must be written."""
