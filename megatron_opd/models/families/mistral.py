"""Describes Mistral 7B, Nemo and Small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_opd.models.families.family import ATTENTION, COMMON, DENSE_MLP, POST_NORM, Family


def _check(config: Mapping[str, Any]) -> None:
    if config["num_key_value_heads"] is None:
        raise ValueError(
            "num_key_value_heads must be an integer, got None: transformers refuses the file"
        )


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (*ATTENTION, POST_NORM, *DENSE_MLP),
    end_token=2,
    defaults={
        **COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    window="limit",
    check=_check,
)
