"""Reads what Megatron's own fields change about memory, and lists the fields it does not read.

Only these fields of learner.megatron, learner.ddp and learner.optimizer are read; the others are
named by `unread`, so that a plan never passes over one in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.recompute import FEED_FORWARD, Recompute

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}
UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
READ = {
    "megatron": UNEVEN,
    "ddp": ("grad_reduce_in_fp32",),
    "optimizer": (
        "use_precision_aware_optimizer",
        "store_param_remainders",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
    ),
}
# Fields that have no part in memory, or less than a plan can see.
HARMLESS = (
    "moe_router_",
    "moe_aux_loss_",
    "moe_z_loss_",
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "overlap_",
    "cross_entropy_",
    "attention_backend",
    "deterministic_mode",
    "lr",
    "decoupled_",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds the bytes of an element of each kind.

    recomputed_modules: parts of a layer whose activations are recomputed, in Megatron's words.
    offloaded: share of the optimizer's bytes in the host's memory.
    """

    recompute: Recompute
    recomputed_modules: tuple[str, ...]
    gradient_bytes: int
    main_bytes: int
    moment_bytes: int
    offloaded: float

    @staticmethod
    def of(config: LearnerConfig) -> Settings:
        """Combine the defaults of this program with the configuration's own fields."""
        optimizer = config.optimizer.megatron
        precise = bool(optimizer.get("use_precision_aware_optimizer", False))

        def width(name: str) -> int:
            return WIDTHS.get(str(optimizer.get(name, "float32")), 4) if precise else 4

        main = width("main_params_dtype") if config.dtype != "float32" else 0
        if precise and main == 4 and optimizer.get("store_param_remainders", True):
            main = 2  # the bits that the bfloat16 weight lacks
        half = config.dtype != "float32" and not config.ddp.get("grad_reduce_in_fp32", True)
        offload = bool(optimizer.get("optimizer_cpu_offload", False))
        return Settings(
            recompute=config.recompute,
            recomputed_modules=config.recomputed_modules,
            gradient_bytes=2 if half else 4,
            main_bytes=main,
            moment_bytes=width("exp_avg_dtype") + width("exp_avg_sq_dtype"),
            offloaded=float(optimizer.get("optimizer_offload_fraction", 0.0)) if offload else 0.0,
        )


def unread(config: LearnerConfig) -> list[str]:
    """Return keys of Megatron that a plan does not read although they may change memory."""
    sections: Mapping[str, Mapping[str, Any]] = {
        "megatron": config.megatron,
        "ddp": config.ddp,
        "optimizer": config.optimizer.megatron,
    }
    read = {"recompute_modules"} if set(config.recomputed_modules) <= set(FEED_FORWARD) else set()
    return [
        f"learner.{section}.{name}"
        for section, values in sections.items()
        for name in values
        if name not in {*READ[section], *read} and not name.startswith(HARMLESS)
    ]
