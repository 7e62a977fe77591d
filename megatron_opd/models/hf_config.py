"""Fills in what config.json leaves out, and decides what it says twice, as transformers 5 does.

Its configuration classes are the reference; tests/unit/models/test_hf_config.py compares. Nothing
here imports them, as they take seconds to load. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import Family

# Keys that one of learner, transformers and SGLang acts on and another ignores, and the values at
# which they agree.
ONE_SIDED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "bias": (False, None),
    "mlp_bias": (False,),
    "qkv_bias": (True, None),
    "use_sliding_window": (False,),
    "sliding_window_size": (None,),
    "window_size": (None,),
    "hidden_act": ("silu",),
    "is_causal": (True, None),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", None),
    "mamba_ssm_dtype": ("float32", None),
    "rope_is_neox_style": (True,),
    "rope_interleave": (True,),
    "partial_rotary_factor": (1,),
    "dual_chunk_attention_config": (None,),
    "final_logit_softcapping": (None,),
    "per_layer_config": (None,),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
}
ROPE_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
    | {"original_max_position_embeddings", "partial_rotary_factor"}
)
YARN_KEYS = frozenset(
    {"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
    | {"attention_factor", "attn_factor"}
)


def complete(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return `config` with every key that it lacks, num_experts by the family's own name for it.

    ValueError: it holds what learner and servers would read differently.
    """
    full = {**family.defaults, **config}
    for key, agreed in ONE_SIDED.items():
        if key == "partial_rotary_factor" and family.rotary_share is not None:
            continue
        allowed = agreed + family.allowed.get(key, ())
        if key in full and full[key] not in allowed and key not in family.reads:
            raise ValueError(f"{key} must be {allowed[0]!r}, got {shown(full[key])}")
    if family.check is not None:
        family.check(full)
    # Qwen's carry a window that use_sliding_window switches off; the others have no such switch
    switched = "use_sliding_window" in family.defaults
    window = None if switched and not full["use_sliding_window"] else full.get("sliding_window")
    if window is not None and family.window == "none":
        raise ValueError(f"sliding_window must be null, got {shown(window)}")
    full["sliding_window"] = window
    if family.has_delta_net:
        full["layer_types"] = check_delta_nets(full)
    layers = full.get("layer_types") or []
    kinds = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    kinds += ("linear_attention",) if family.has_delta_net else ()
    if not isinstance(layers, list) or any(each not in kinds for each in layers):
        raise ValueError(f"layer_types must name {' or '.join(kinds)} alone, got {shown(layers)}")
    if layers and len(layers) != full["num_hidden_layers"]:
        raise ValueError(
            f"layer_types must name {full['num_hidden_layers']} layers, got {len(layers)}"
        )
    # null means as many as heads, except where transformers refuses it: mixtures, gated delta nets
    refuses = (family.moe and not family.latent) or family.has_delta_net
    if full["num_key_value_heads"] is None and not refuses:
        full["num_key_value_heads"] = full["num_attention_heads"]
    if family.moe:
        own, *others = family.experts_keys
        if full[own] is None:
            raise ValueError(f"{own} must be an integer, got None")
        # transformers' attribute_map: whichever is not the class's own field is set last
        full["num_experts"] = next((full[key] for key in others if key in full), full[own])
    return full


def check_delta_nets(config: Mapping[str, Any]) -> list[str]:
    """Return layer_types of a model with gated delta nets.

    ValueError: they are not those that SGLang 0.5.23 builds, which reads full_attention_interval.
    """
    every, count = config.get("full_attention_interval"), config["num_hidden_layers"]
    if type(every) is not int or every < 1 or type(count) is not int:
        raise ValueError(
            "full_attention_interval must be an integer >= 1, by which SGLang 0.5.23 places "
            f"attention, got {shown(every)}"
        )
    served = [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)
    ]
    layers: Any = config.get("layer_types")
    if layers is not None and layers != served:
        raise ValueError(
            "layer_types must have full_attention in every layer of full_attention_interval "
            f"({every}) alone, as SGLang 0.5.23 reads that one, got {shown(layers)}"
        )
    return served


def _of_layers(config: dict[str, Any], family: Family, *, windowed: bool) -> dict[str, Any]:
    """Return `config` with the rotary settings of one kind of layers alone. ValueError.

    transformers 5 writes both into rope_parameters; transformers 4 wrote rope_theta and
    rope_scaling of the layers without a window, rope_local_base_freq of the others.
    """
    written, kinds = config.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if any(each not in kinds for each in written):
        raise ValueError(
            f"rope_parameters must hold {' and '.join(kinds)} alone in a {family.name} model, got "
            f"{shown(written)}"
        )
    settings = written.get(kinds[windowed]) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"{kinds[windowed]} must be a mapping, got {shown(settings)}")
    if windowed and settings.get("rope_type", "default") != "default":
        raise ValueError(
            "rope_type of sliding_attention must be 'default', which SGLang 0.5.23 takes it for, "
            f"got {shown(settings['rope_type'])}"
        )
    scaling = {} if windowed else config.get("rope_scaling") or {}
    if settings and "rope_type" not in settings | scaling:
        raise ValueError(
            f"rope_type must stand in {kinds[windowed]}, where transformers fails without it, got "
            f"{shown(settings)}"
        )
    for key in ("type", "rope_theta"):
        if key in scaling or (key == "type" and key in settings):
            raise ValueError(
                f"{key} must not stand in the rotary settings of a {family.name} model: write "
                "rope_type there, and rope_theta outside rope_scaling"
            )
    theta = ("rope_local_base_freq", family.window_theta) if windowed else ("rope_theta", None)
    found = {"rope_theta": config.get(theta[0], theta[1] or family.theta)} | settings | scaling
    return config | {"rope_scaling": None, "rope_parameters": found}


def rope_parameters(
    config: dict[str, Any], family: Family, *, windowed: bool = False
) -> dict[str, Any]:
    """Return the rotary settings, with rope_type and rope_theta, of windowed layers or the others.

    transformers 5 has rope_parameters, transformers 4 rope_theta and rope_scaling. Where both are
    there, rope_scaling is taken whole, and a rope_theta inside rope_parameters is lost.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) and not isinstance(config[key], dict):
            raise ValueError(f"{key} must be a mapping, got {shown(config[key])}")
    if family.window_theta is not None:
        config = _of_layers(config, family, windowed=windowed)
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", family.theta))
    rope.setdefault("rope_type", rope.get("type", "default"))
    kind = rope["rope_type"]
    if kind not in family.rope_types:
        raise ValueError(
            f"rope type must be one of {', '.join(family.rope_types)}, got {shown(kind)}"
        )
    known = (ROPE_KEYS | YARN_KEYS if kind == "yarn" else ROPE_KEYS) | family.rope_keys
    unknown = rope.keys() - known
    if unknown:
        raise ValueError(
            f"rotary settings must be of {', '.join(sorted(known))}, got {shown(min(unknown))}"
        )
    rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    share = config.get("partial_rotary_factor", family.rotary_share or 1)
    if family.rotary_dim and "rotary_dim" in config:
        share = config["rotary_dim"] / config["head_dim"]
    if rope.setdefault("partial_rotary_factor", share) != 1 and family.rotary_share is None:
        raise ValueError(
            "partial_rotary_factor must be 1: every feature of a head is rotated, got "
            f"{shown(rope['partial_rotary_factor'])}"
        )
    outside = config.get("original_max_position_embeddings")
    if outside is not None and outside != rope["original_max_position_embeddings"]:
        raise ValueError(
            "original_max_position_embeddings must stand inside rope_parameters alone, as SGLang "
            f"takes the one outside and transformers the one inside, got {shown(outside)}"
        )
    return rope


def rope_note(key: str, config: dict[str, Any]) -> str | None:
    """Return what a second place of rotary settings changes; None: there is none."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if not (isinstance(scaling, dict) and isinstance(parameters, dict) and scaling and parameters):
        return None
    if all(scaling.get(key, config.get(key)) == value for key, value in parameters.items()):
        return None
    return (
        f"{key}: rope_scaling {shown(scaling)} replaces rope_parameters {shown(parameters)} whole, "
        "its rope_theta too, as in transformers and SGLang: to keep both, put all into "
        "rope_parameters"
    )
