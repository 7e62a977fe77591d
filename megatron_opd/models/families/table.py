"""Lists the families that a learner can train. Torch-free."""

from __future__ import annotations

from megatron_opd.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from megatron_opd.models.families.family import Family
from megatron_opd.models.families.gemma import GEMMA3_TEXT
from megatron_opd.models.families.glm import GLM4_MOE
from megatron_opd.models.families.gpt_oss import GPT_OSS
from megatron_opd.models.families.llama import LLAMA
from megatron_opd.models.families.minimax import MINIMAX_M2
from megatron_opd.models.families.mistral import MISTRAL
from megatron_opd.models.families.mixtral import MIXTRAL
from megatron_opd.models.families.olmo import OLMO2, OLMO3
from megatron_opd.models.families.phi import PHI3
from megatron_opd.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from megatron_opd.models.families.qwen_delta import QWEN3_5, QWEN3_5_MOE
from megatron_opd.models.families.smollm import SMOLLM3

_DENSE = (GEMMA3_TEXT, LLAMA, MISTRAL, OLMO2, OLMO3, PHI3, SMOLLM3)
_QWEN = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE)
_LATENT = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE)
_MIXTURES = (GLM4_MOE, GPT_OSS, MINIMAX_M2, MIXTRAL)
FAMILIES = {family.name: family for family in (*_DENSE, *_MIXTURES, *_QWEN, *_LATENT)}


def family_of(model_type: str) -> Family:
    """Return the table of a config.json's `model_type`; ValueError lists the known ones."""
    if model_type == "kimi_k2":
        raise ValueError(
            "model_type kimi_k2 has code of its own, which nothing here runs; the model is "
            "DeepSeek-V3's: in config.json set model_type to deepseek_v3 and remove auto_map"
        )
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model_type must be one of {known}, got {model_type[:80]!r}")
    return FAMILIES[model_type]
