"""Reads what config.json says about the model, and checks it once. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.config.wording import shown
from megatron_opd.models.delta_net import DeltaNet
from megatron_opd.models.families.family import Family, published_form
from megatron_opd.models.families.table import family_of
from megatron_opd.models.file_kinds import is_pointer, other_kind, pointer_line
from megatron_opd.models.hf_config import complete
from megatron_opd.models.latent import Latent
from megatron_opd.models.rope import Rope
from megatron_opd.models.rope_config import read_rope
from megatron_opd.models.values import (
    MAX_EXPERTS,
    MAX_LAYERS,
    read_count,
    read_flag,
    read_number,
    read_positive,
)
from sglang_bridge.language_models import published_class, text_config

_QUERIES = "query_pre_attn_scalar"
_FURTHER = "num_nextn_predict_layers"
_LIMIT = "swiglu_limit"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describes the architecture. moe_layers: layers with experts; hidden sizes in features.

    shared_ffn_size: features of the experts that every token visits, together; 0: there are none.
    norm_topk_prob: the chosen experts' probabilities are renormalised to sum 1. routed_scale: what
    they are multiplied with then. expert_groups: (groups, those of a token), of whose experts alone
    it chooses, by the sum of a group's two highest scores; None: of all experts. tied: the output
    layer shares the embedding. initializer_range: standard deviation of a fresh weight. window:
    positions that a query sees in the windowed layers, its own included. window_rope: rotary
    positions of those layers; None: as the others'. window_limit: a window that SGLang ignores, so
    that no context may be longer. unturned: layers without rotary positions. cut_to: see num_ids;
    None: of every row. latent: how keys and values are made of a latent; head_dim is then the size
    of a query and a key, and num_kv_heads num_heads; None: of the layer's input. delta_net: what
    delta_layers have instead of attention. query_scalar: by whose root products of queries and keys
    are divided; None: by that of head_dim. gate_limit: where gates and ups of experts are cut off,
    of which then (up + 1) gate sigmoid(1.702 gate) is made; None: see Family.gelu. carried: starts
    of names of tensors that no text goes through. published: files are of a class with other parts
    besides, and have its names (sglang_bridge/language_models.py).
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
    shared_ffn_size: int = 0
    norm_topk_prob: bool = True
    routed_scale: float = 1.0
    expert_groups: tuple[int, int] | None = None
    moe_layers: tuple[bool, ...] = ()
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    window_rope: Rope | None = None
    window_limit: int | None = None
    unturned: tuple[bool, ...] = ()
    cut_to: int | None = None
    latent: Latent | None = None
    delta_net: DeltaNet | None = None
    delta_layers: tuple[bool, ...] = ()
    query_scalar: int | None = None
    gate_limit: float | None = None
    carried: tuple[str, ...] = ()
    published: bool = False

    @property
    def num_ids(self) -> int:
        """Returns the ids that have a probability; further rows of the embedding are padding."""
        return self.vocab_size if self.cut_to is None else self.cut_to

    @property
    def value_dim(self) -> int:
        """Returns the features of a value head."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def pair_features(self) -> int:
        """Returns the features of a head that each (query, key) pair is multiplied by."""
        return self.head_dim + self.value_dim

    @property
    def longest_context(self) -> int:
        """Returns the tokens that learner and server read alike."""
        return min(self.max_position, self.window_limit or self.max_position)

    @property
    def is_moe(self) -> bool:
        """Returns whether any layer holds experts."""
        return any(self.moe_layers)

    def is_windowed(self, layer: int) -> bool:
        """Return whether a query of this layer sees a window of positions alone."""
        return bool(self.windowed) and self.windowed[layer]

    @property
    def attention_layers(self) -> int:
        """Returns how many layers have attention."""
        return self.num_layers - sum(self.delta_layers)

    def has_delta_net(self, layer: int) -> bool:
        """Return whether this layer has a gated delta net instead of attention."""
        return bool(self.delta_layers) and self.delta_layers[layer]

    def padded_vocab(self, tp: int) -> int:
        """Return the embedding's rows when `tp` ranks split it; added rows are zeros."""
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
        rules = [
            ("tp", parallel.tp, "attention heads", self.num_heads),
            ("tp", parallel.tp, "feed-forward features", self.ffn_size),
            ("pp", 1 if uneven else parallel.pp, "layers", self.num_layers),
            ("ep", parallel.ep, "experts", self.num_experts),
        ]
        if self.shared_ffn_size:
            rules.append(("tp", parallel.tp, "shared experts' features", self.shared_ffn_size))
        if self.delta_net is not None:
            # a value head goes where its key head goes
            ranks = parallel.tp * parallel.cp
            rules.append(("tp * cp", ranks, "key heads of delta nets", self.delta_net.keys))
        for key, degree, what, count in rules:
            if count % degree or (degree > 1 and count == 0):
                raise ValueError(
                    f"learner.parallel.{key} must divide the model's {what}, "
                    f"got {key}={degree} and {count} {what}"
                )
        if self.family.expert_biases and parallel.expert_tp > 1:
            raise ValueError(
                "learner.parallel.etp must be 1 for experts with biases, which Megatron-Core "
                f"0.19.2 adds once for each rank that shares one, got {parallel.expert_tp}"
            )
        tp, heads = parallel.tp, self.num_kv_heads
        if max(tp, heads) % min(tp, heads):
            raise ValueError(
                "learner.parallel.tp must divide the model's key-value heads or be a multiple of "
                f"them, got tp={tp} and {heads} key-value heads"
            )
        queries = self.num_heads * (2 if self.family.output_gate else 1)
        rows = (queries + 2 * heads) * self.head_dim
        if rows % tp:
            raise ValueError(
                "learner.parallel.tp must divide the model's rows of queries, keys and values, "
                f"got tp={tp} and {rows} rows"
            )


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file `path`. ValueError names what is wrong with it."""
    try:
        if is_pointer(path):
            raise ValueError(pointer_line(path))
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        kind = other_kind(path.parent)
        raise ValueError(
            kind or f"{path.parent} is not a Hugging Face checkpoint: it has no {path.name}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def read_text_config(path: Path) -> dict[str, Any]:
    """Read what the file `path` says of the language model. ValueError names what is wrong."""
    config = read_config(path)
    try:
        return text_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_model_spec(model: Path) -> ModelSpec:
    """Read `model`/config.json. ValueError: missing, not JSON, or not a model that is known."""
    path = model / "config.json"
    config = read_config(path)
    try:
        spec = _spec(text_config(config))
        if published_class(config) is None:
            return spec
        return replace(spec, family=published_form(spec.family), published=True)
    except KeyError as error:
        raise ValueError(f"{path} lacks the key {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _spec(raw: dict[str, Any]) -> ModelSpec:
    family = family_of(str(raw["model_type"]))
    config = complete(raw, family)
    if "use_qk_norm" in family.defaults:
        read_flag(config, "use_qk_norm")
    family = family.of(config)
    layers = read_count(config, "num_hidden_layers", most=MAX_LAYERS)
    heads, hidden = read_count(config, "num_attention_heads"), read_count(config, "hidden_size")
    kv_heads = read_count(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}"
        )
    if family.heads_fill_hidden and hidden % heads:
        raise ValueError(
            f"num_attention_heads must divide hidden_size, got {heads} and {hidden}: transformers "
            "refuses the file"
        )
    rope, latent = read_rope(config, family), _latent(config) if family.latent else None
    head_dim = _head_dim(config, family, hidden // heads) if latent is None else latent.query
    turning = rope.features(head_dim)
    if turning < 2 or turning % 2 or turning > head_dim:
        raise ValueError(
            "partial_rotary_factor must leave an even number >= 2 of a head's features that turn, "
            f"got {rope.share} of {head_dim}"
        )
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=read_count(config, "intermediate_size"),
        vocab_size=read_count(config, "vocab_size"),
        max_position=read_count(config, "max_position_embeddings"),
        rope=rope,
        norm_eps=read_positive(config, "rms_norm_eps", whole=False),
        tied=read_flag(config, "tie_word_embeddings"),
        initializer_range=read_positive(config, "initializer_range", whole=False),
        latent=latent,
        **_experts(config, family, layers),
        **_windows(config, family, layers, rope),
        **_delta_net(config, family),
        unturned=_unturned(config, family, layers),
        query_scalar=read_count(config, _QUERIES) if _QUERIES in family.defaults else None,
        carried=_carried(config, family, layers),
        gate_limit=_gate_limit(config, family),
    )


def _carried(config: dict[str, Any], family: Family, layers: int) -> tuple[str, ...]:
    further = 0
    if config.get(_FURTHER) is not None:
        further = read_number(config, _FURTHER)
    found: list[str] = []
    for start in family.carried:
        numbers = range(layers, layers + further) if "{next}" in start else (0,)
        found += [start.replace("{next}", str(number)) for number in numbers]
    return tuple(found)


def _gate_limit(config: dict[str, Any], family: Family) -> float | None:
    return read_positive(config, _LIMIT, whole=False) if _LIMIT in family.defaults else None


def _unturned(config: dict[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    if "no_rope_layers" not in family.defaults:
        return ()
    turned: Any = config["no_rope_layers"]
    every = read_count(config, "no_rope_layer_interval")
    if turned is None:
        turned = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(turned, list) or [each for each in turned if each not in (0, 1)]:
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {shown(turned)}")
    if len(turned) != layers:
        raise ValueError(f"no_rope_layers must name {layers} layers, got {len(turned)}")
    return tuple(not each for each in turned)


def _head_dim(config: dict[str, Any], family: Family, default: int) -> int:
    # a class with a default of its own has no null
    given = config.get("head_dim") is not None or "head_dim" in family.defaults
    head_dim = read_count(config, "head_dim") if given else default
    if head_dim < 2 or head_dim % 2:  # rotary positions turn pairs of features
        raise ValueError(f"head_dim must be an even number >= 2, got {head_dim}")
    return head_dim


def _latent(config: dict[str, Any]) -> Latent:
    rank = None if config["q_lora_rank"] is None else read_count(config, "q_lora_rank")
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = Latent(rank, *(read_count(config, key) for key in keys))
    if found.turning % 2:  # rotary positions turn pairs of features
        raise ValueError(f"qk_rope_head_dim must be an even number, got {found.turning}")
    heads, keys_of = config["num_attention_heads"], config["num_key_value_heads"]
    if keys_of != heads:
        raise ValueError(
            "num_key_value_heads must be num_attention_heads with latent attention, which has a "
            f"key for every head, got {shown(keys_of)} and {heads}"
        )
    return found


def _delta_net(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of ModelSpec that say where there is no attention."""
    if not family.has_delta_net:
        return {}
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    keys = [f"linear_{name}" for name in (*sizes, "conv_kernel_dim")]
    net = DeltaNet(*(read_count(config, key) for key in keys))
    if net.values % net.keys:
        raise ValueError(
            "linear_num_key_heads must divide linear_num_value_heads, got "
            f"{net.keys} and {net.values}"
        )
    kinds = config["layer_types"]
    return {
        "delta_net": net,
        "delta_layers": tuple(kind == "linear_attention" for kind in kinds),
    }


def _windows(config: dict[str, Any], family: Family, layers: int, rope: Rope) -> dict[str, Any]:
    """Return the fields of ModelSpec that say what queries do not see."""
    if config["sliding_window"] is None:
        return {}
    window = read_count(config, "sliding_window")
    if family.window == "limit":
        return {"window_limit": window}
    every = family.window_every
    if "sliding_window_pattern" in family.defaults and not config.get("layer_types"):
        every = read_count(config, "sliding_window_pattern")
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    if family.window_theta is not None:
        plain = read_rope(config, family, windowed=True)
    elif family.plain_window:
        plain = Rope(rope.theta, share=rope.share, interleaved=rope.interleaved)
    else:
        plain = rope
    return {
        "window": window,
        "windowed": tuple(kind == "sliding_attention" for kind in kinds),
        "window_rope": plain if plain != rope else None,
    }


def _experts(config: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return the fields of ModelSpec that say where experts are."""
    if not family.moe:
        return {"moe_layers": (False,) * layers}
    experts = read_count(config, "num_experts", most=MAX_EXPERTS)
    chosen = read_count(config, "num_experts_per_tok", most=MAX_EXPERTS)
    dense: Any = []
    step = 1
    if "first_k_dense_replace" in family.defaults:
        dense = list(range(read_number(config, "first_k_dense_replace")))
    if "mlp_only_layers" in family.defaults:
        dense = config["mlp_only_layers"] or []
        step = read_count(config, "decoder_sparse_step")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"mlp_only_layers must be a list of integers, got {shown(dense)}")
    moe_layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if any(moe_layers) and chosen > experts:
        raise ValueError(f"num_experts_per_tok must be <= num_experts, got {chosen} and {experts}")
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_ffn_size": read_count(config, family.expert_ffn_key),
        "shared_ffn_size": _shared_ffn_size(config, family),
        "norm_topk_prob": family.sums_topk_to_one or read_flag(config, "norm_topk_prob"),
        "moe_layers": moe_layers,
        **_sigmoid_router(config, family, experts, chosen),
    }


def _sigmoid_router(
    config: dict[str, Any], family: Family, experts: int, chosen: int
) -> dict[str, Any]:
    """Return the fields of ModelSpec of routers with sigmoid scores and a correction bias.

    ValueError: Megatron-Core 0.19.2 has no such router.
    """
    if not family.sigmoid_router:
        return {}
    if chosen < 2:
        raise ValueError(f"num_experts_per_tok must be >= 2 with sigmoid scores, got {chosen}")
    if not family.sums_topk_to_one and not read_flag(config, "norm_topk_prob"):
        raise ValueError("norm_topk_prob must be true with sigmoid scores, got False")
    scale = 1.0
    if "routed_scaling_factor" in family.defaults:
        scale = read_positive(config, "routed_scaling_factor", whole=False)
    if "n_group" not in family.defaults:
        return {"routed_scale": scale}
    groups, used = read_count(config, "n_group"), read_count(config, "topk_group")
    if experts % groups or used > groups:
        raise ValueError(
            "n_group must divide the experts and be >= topk_group, got "
            f"n_group {groups}, {experts} experts and topk_group {used}"
        )
    if groups == 1:
        return {"routed_scale": scale}
    if chosen // used != 2 or experts // groups < 2 or experts // groups * used < chosen:
        raise ValueError(
            "topk_group must be half of num_experts_per_tok where n_group > 1, because the learner "
            "ranks groups by the sum of num_experts_per_tok // topk_group scores, SGLang by that "
            f"of 2, got topk_group {used} and num_experts_per_tok {chosen}"
        )
    return {"routed_scale": scale, "expert_groups": (groups, used)}


def _shared_ffn_size(config: dict[str, Any], family: Family) -> int:
    """Return the features of the experts that every token visits; 0: the family has none."""
    if "shared_expert_intermediate_size" in family.defaults:
        return read_count(config, "shared_expert_intermediate_size")
    if "n_shared_experts" in family.defaults:
        return read_count(config, "n_shared_experts") * read_count(config, family.expert_ffn_key)
    return 0
