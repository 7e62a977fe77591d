"""Reads the rotary positions that config.json asks for. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from typing import Any

from megatron_opd.config.wording import shown
from megatron_opd.models.families.family import Family
from megatron_opd.models.hf_config import rope_parameters
from megatron_opd.models.rope import Rope, RopeType, yarn_attention_factor
from megatron_opd.models.values import read_count, read_flag, read_positive


def read_rope(config: dict[str, Any], family: Family, *, windowed: bool = False) -> Rope:
    """Return the rotary positions of windowed layers or the others. KeyError, ValueError."""
    rope = rope_parameters(config, family, windowed=windowed)
    kind: RopeType = rope["rope_type"]
    share = read_positive(rope, "partial_rotary_factor")
    plain = Rope(read_positive(rope, "rope_theta"), share=share, interleaved=family.interleaved)
    if kind == "default":
        return plain
    stretched = replace(plain, type=kind, factor=read_positive(rope, "factor"))
    if kind == "linear":
        return stretched
    if kind == "yarn":
        return (
            _latent_yarn(rope, _yarn(stretched, rope)) if family.latent else _yarn(stretched, rope)
        )
    low, high = read_positive(rope, "low_freq_factor"), read_positive(rope, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor must be < high_freq_factor, got {low} and {high}")
    return replace(
        stretched,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=read_count(rope, "original_max_position_embeddings"),
    )


def _yarn(plain: Rope, settings: dict[str, Any]) -> Rope:
    if plain.share != 1:
        raise ValueError(
            "partial_rotary_factor must be 1 with YaRN, whose attention factor the learner applies "
            f"to whole heads, got {plain.share:g}"
        )
    if plain.theta <= 1 or plain.factor < 1:
        raise ValueError(
            "rope_theta must be > 1 and factor >= 1 with YaRN, got "
            f"{plain.theta:g} and {plain.factor:g}"
        )
    settings = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attn_factor": 1} | settings
    weights = [
        None if settings.get(key) is None else read_positive(settings, key)
        for key in ("mscale", "mscale_all_dim")
    ]
    factor = yarn_attention_factor(plain.factor, *weights)
    given = settings.get("attention_factor")
    if given is not None and not isclose(read_positive(settings, "attention_factor"), factor):
        raise ValueError(
            f"attention_factor must be {factor}, which follows from the other rotary settings, "
            f"because SGLang 0.5.23 ignores it, got {shown(given)}; leave it out, or say "
            "attn_factor, by which SGLang multiplies it"
        )
    return replace(
        plain,
        original_max_position=read_count(settings, "original_max_position_embeddings"),
        beta_fast=read_positive(settings, "beta_fast"),
        beta_slow=read_positive(settings, "beta_slow"),
        truncate=read_flag(settings, "truncate"),
        attention_factor=factor,
        attn_factor=read_positive(settings, "attn_factor"),
    )


def _latent_yarn(settings: dict[str, Any], rope: Rope) -> Rope:
    """Return YaRN as SGLang's latent attention has it: the softmax is scaled, nothing else."""
    weight = settings.get("mscale_all_dim")
    if not weight or settings.get("mscale") != weight:
        raise ValueError(
            "mscale and mscale_all_dim must be equal numbers > 0 with latent attention and YaRN, "
            f"got {shown(settings.get('mscale'))} and {shown(weight)}"
        )
    if not rope.truncate or rope.attn_factor != 1:
        raise ValueError(
            "truncate must be true and attn_factor 1 with latent attention, where SGLang 0.5.23 "
            f"reads neither as transformers does, got {rope.truncate} and {rope.attn_factor:g}"
        )
    return replace(rope, mscale_all_dim=read_positive(settings, "mscale_all_dim"))
