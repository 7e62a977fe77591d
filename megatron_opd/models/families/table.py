"""Lists the families that a learner can train. Torch-free."""

from __future__ import annotations

from megatron_opd.models.families.family import Family
from megatron_opd.models.families.llama import LLAMA
from megatron_opd.models.families.mistral import MISTRAL
from megatron_opd.models.families.mixtral import MIXTRAL
from megatron_opd.models.families.olmo import OLMO2, OLMO3
from megatron_opd.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES = {
    family.name: family
    for family in (LLAMA, MISTRAL, MIXTRAL, OLMO2, OLMO3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
}


def family_of(model_type: str) -> Family:
    """Return the table of a config.json's `model_type`; ValueError lists the known ones."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model_type must be one of {known}, got {model_type[:80]!r}")
    return FAMILIES[model_type]
