"""What config.json says about the model, checked once. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.weight_sync.names import Family, family_of

COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. theta: base of the wavelengths. factor: what long ones are stretched by.

    linear stretches all of them; llama3 those above original_max_position / low_freq_factor
    positions, none below original_max_position / high_freq_factor, and blends in between.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture. moe_layers: which layers hold experts; hidden sizes in features.

    norm_topk_prob: the chosen experts' probabilities are renormalised to sum 1. tied: the output
    layer shares the embedding. initializer_range: standard deviation of a fresh weight.
    """

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position: int
    rope: Rope
    norm_eps: float
    tied: bool
    initializer_range: float
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Whether any layer holds experts."""
        return any(self.moe_layers)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding when `tp` ranks split it: the next multiple. Added rows are 0."""
        return -(-self.vocab_size // tp) * tp

    def check_parallel(self, parallel: ParallelConfig, *, uneven: bool = False) -> None:
        """Raise ValueError, naming key, rule and value, when the model cannot be cut this way.

        uneven: stages need not hold equally many layers.
        """
        chunks = 1 if uneven else parallel.pp * parallel.vpp
        if self.num_layers % chunks and parallel.vpp > 1:
            raise ValueError(
                "learner.parallel.pp * vpp must divide the model's layers, "
                f"got pp={parallel.pp} * vpp={parallel.vpp} and {self.num_layers} layers"
            )
        rules = (
            ("tp", parallel.tp, "attention heads", self.num_heads),
            ("tp", parallel.tp, "key-value heads", self.num_kv_heads),
            ("tp", parallel.tp, "feed-forward features", self.ffn_size),
            ("pp", 1 if uneven else parallel.pp, "layers", self.num_layers),
            ("ep", parallel.ep, "experts", self.num_experts),
        )
        for key, degree, what, count in rules:
            if count % degree or (degree > 1 and count == 0):
                raise ValueError(
                    f"learner.parallel.{key} must divide the model's {what}, "
                    f"got {key}={degree} and {count} {what}"
                )


def read_model_spec(model: Path) -> ModelSpec:
    """Read `model`/config.json. ValueError: missing, not JSON, or an unknown architecture."""
    path = model / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{model} is not a Hugging Face checkpoint: it has no config.json"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    try:
        return _spec(config)
    except KeyError as error:
        raise ValueError(f"{path} lacks the key {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _spec(config: dict[str, Any]) -> ModelSpec:
    family = family_of(config["model_type"])
    for key, allowed in (
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("use_sliding_window", (False, None)),
        ("hidden_act", ("silu", None)),
    ):
        if config.get(key) not in allowed:
            raise ValueError(f"{key} must be {allowed[0]!r}, got {config[key]!r}")
    # Qwen configurations carry a window that use_sliding_window switches off.
    if "use_sliding_window" not in config and config.get("sliding_window") is not None:
        raise ValueError(f"sliding_window must be null, got {config['sliding_window']!r}")
    for key in COUNTS:
        if not isinstance(config[key], int) or config[key] < 1:
            raise ValueError(f"{key} must be an integer >= 1, got {config[key]!r}")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    experts = config.get("num_experts", config.get("num_local_experts")) or 0
    moe, mixtral = family.moe, family.name == "mixtral"
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position=config["max_position_embeddings"],
        rope=_rope(config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        initializer_range=config.get("initializer_range", 0.02),
        num_experts=experts if moe else 0,
        experts_per_token=config["num_experts_per_tok"] if moe else 0,
        expert_ffn_size=config["intermediate_size" if mixtral else "moe_intermediate_size"]
        if moe
        else 0,
        norm_topk_prob=mixtral or bool(config.get("norm_topk_prob", False)),
        moe_layers=tuple(moe and _holds_experts(config, layer) for layer in range(layers)),
    )


def _holds_experts(config: dict[str, Any], layer: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % step == 0


def _rope(config: dict[str, Any]) -> Rope:
    """Transformers 5 writes all of it in rope_parameters, 4 rope_theta beside rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type must be one of default, linear, llama3, got {kind!r}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (1, None):
        raise ValueError("partial_rotary_factor must be 1: every feature of a head is rotated")
    if kind == "default":
        return Rope(float(theta))
    if kind == "linear":
        return Rope(float(theta), kind, float(rope["factor"]))
    return Rope(
        float(theta),
        kind,
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )
