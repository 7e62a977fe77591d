"""The updates of the part `updates`, and the faults that it must find.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LIMIT = 2e-5
"""Largest difference, relative to the largest number of the same tensor, where a formula is
computed in another order: float32 rounds a sum of some hundred products to 1e-6, and AdamW's step
divides gradients by their own size."""
LIMIT_BF16 = 1e-2
"""The same in bfloat16, which rounds to 2^-9: the local layers round the weight gradient of each
micro-batch, TransformerEngine's add products in float32. Weights, which are kept in float32, may be
rounded to a neighbour where an optimizer is computed otherwise."""
LIMIT_BF16_STEPS = 0.1
"""The same after steps whose weights were rounded to 2^-9 too."""
TELLS = 1e-3
"""How much a planted fault must change at least, and the update itself the log-probs."""

DENSE = frozenset({"Linear", "LayerNormLinear", "RMSNorm", "DotProductAttention", "rotary"})
EXPERTS = DENSE | {"GroupedLinear"}
PERMUTED = frozenset({"permute", "unpermute", "sort_chunks"})
ROUTED = frozenset({"router"})
BALANCED = ROUTED | {"router_scores", "balancing_loss"}


@dataclass(frozen=True)
class Case:
    """An update, and what it must equal.

    model: dense or moe. learner: settings of both kinds of layers. engine: learner.megatron of
    TransformerEngine's layers besides, and optimizer: learner.optimizer there. replays: what the
    batch gives of its routing. adam: AdamW is TransformerEngine's FusedAdam, its kernels computed
    by torch; else torch's. as_local: the case whose numbers on the local layers it must have;
    None: those of this one. like: the case whose numbers on TransformerEngine's layers it must have
    instead. limit: how much it may differ, see LIMIT; 0: every number is the same to the last bit.
    except_for: figures that may differ. computed: names of TransformerEngine's that must have been
    computed, besides the layers.
    """

    model: Literal["dense", "moe"]
    learner: Mapping[str, Any] = field(default_factory=dict[str, Any])
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replays: Literal["off", "experts", "gates"] = "off"
    adam: bool = False
    as_local: str | None = None
    like: str | None = None
    limit: float = 0.0
    except_for: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        """How many processes compute it."""
        parallel = self.learner.get("parallel", {})
        return math.prod(parallel.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))

    @property
    def local(self) -> bool:
        """Whether the local layers compute it too."""
        return self.like is None and self.as_local is None

    @property
    def expected(self) -> frozenset[str]:
        """What of TransformerEngine's must have been computed."""
        return (DENSE if self.model == "dense" else EXPERTS) | self.computed


ADAM = {"lr": 1e-3, "eps": 1e-3}
"""Steps that move the model, and are no mere signs of the gradients."""


def _several(**parallel: int) -> dict[str, Any]:
    """Settings of several ranks, with several micro-batches in each of two optimizer steps.

    Megatron exchanges during a pass from the second step on. No clipping: it multiplies by a norm,
    whose sum goes by the ranks' parts.
    """
    return {
        "parallel": parallel,
        "num_mini_batches": 2,
        "max_tokens_per_microbatch": 32,
        "optimizer": ADAM | {"clip_grad": 0.0},
    }


OVERLAPPED = {
    "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
}
"""Buckets small enough that there are several."""
REPLAYED = {"routing_replay": "rollout"}
GATES = REPLAYED | {"routing_weights": "sampler"}
AUX_LOSS = {"megatron": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}}
SELECTIVE, FULL = {"recompute": "selective"}, {"recompute": "full"}
TWICE = {"num_mini_batches": 2}
"""Two optimizer steps: the second reads the state that the first left."""
BF16 = {"dtype": "bfloat16"}
AWARE = {"use_precision_aware_optimizer": True}
TIES = frozenset({"log-probs after"})
"""With remainders TransformerEngine rounds ties away from zero, Megatron to an even number."""
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}

CASES = {
    "dense": Case("dense"),
    "dense, full recomputation": Case("dense", FULL),
    "moe": Case("moe"),
    "moe, selective recomputation": Case("moe", SELECTIVE),
    "dense, attention recomputed": Case(
        "dense", SELECTIVE | {"megatron": {"recompute_modules": ["core_attn"]}}
    ),
    "moe, replay, full recomputation": Case("moe", REPLAYED | FULL, replays="experts"),
    "moe, replay, selective recomputation": Case("moe", REPLAYED | SELECTIVE, replays="experts"),
    "moe, replay with gates, full recomputation": Case("moe", GATES | FULL, replays="gates"),
    "moe, replay with gates, selective recomputation": Case(
        "moe", GATES | SELECTIVE, replays="gates"
    ),
    "dp 2": Case("dense", _several(dp=2)),
    "dp 2, overlapped": Case("dense", _several(dp=2) | OVERLAPPED, like="dp 2"),
    "dp 2, ep 2, replay": Case("moe", _several(dp=2, ep=2) | REPLAYED | FULL, replays="experts"),
    "dp 2, ep 2, replay, overlapped": Case(
        "moe",
        _several(dp=2, ep=2) | REPLAYED | FULL | OVERLAPPED,
        replays="experts",
        like="dp 2, ep 2, replay",
    ),
    "tp 2": Case("dense", _several(tp=2)),
    "tp 2, moe": Case("moe", _several(tp=2)),
    "tp 2, ep 2, replay with gates": Case(
        "moe", _several(tp=2, ep=2, etp=1) | GATES | SELECTIVE, replays="gates"
    ),
    "cp 2": Case("dense", _several(cp=2)),
    "cp 2, replay": Case("moe", _several(cp=2) | REPLAYED | FULL, replays="experts"),
    "dense, fused activation": Case(
        "dense", engine={"bias_activation_fusion": True}, as_local="dense", limit=LIMIT
    ),
    "moe, fused activation": Case(
        "moe", engine={"bias_activation_fusion": True}, as_local="moe", limit=LIMIT
    ),
    "moe, fused permutation": Case(
        "moe", engine={"moe_permute_fusion": True}, like="moe", computed=PERMUTED
    ),
    "dp 2, ep 2, replay, fused permutation": Case(
        "moe",
        _several(dp=2, ep=2) | REPLAYED | FULL,
        {"moe_permute_fusion": True},
        replays="experts",
        like="dp 2, ep 2, replay",
        computed=PERMUTED,
    ),
    "moe, fused router": Case(
        "moe", engine={"moe_router_fusion": True}, like="moe", computed=ROUTED
    ),
    "moe, balanced": Case("moe", AUX_LOSS),
    "moe, balanced, fused router": Case(
        "moe",
        AUX_LOSS,
        {"moe_router_fusion": True},
        like="moe, balanced",
        computed=BALANCED,
    ),
    "dense, fused addition": Case("dense", engine={"bias_dropout_fusion": True}, like="dense"),
    "moe, fused addition": Case("moe", engine={"bias_dropout_fusion": True}, like="moe"),
    "dense, FusedAdam": Case("dense", TWICE, adam=True, limit=LIMIT),
    "dense, bfloat16": Case("dense", BF16, adam=True, limit=LIMIT_BF16),
    "dense, bfloat16, two steps": Case("dense", BF16 | TWICE, adam=True, limit=LIMIT_BF16_STEPS),
    "dense, bfloat16, precision-aware": Case(
        "dense",
        BF16 | TWICE,
        optimizer=AWARE | {"store_param_remainders": False},
        adam=True,
        like="dense, bfloat16, two steps",
    ),
    "dense, bfloat16, precision-aware, remainders": Case(
        "dense",
        BF16,
        optimizer=AWARE,
        adam=True,
        like="dense, bfloat16",
        except_for=TIES,
    ),
    "dense, bfloat16, precision-aware, moments in bfloat16": Case(
        "dense",
        BF16 | TWICE,
        optimizer=AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
        adam=True,
        like="dense, bfloat16, two steps",
        limit=LIMIT_BF16,
    ),
    "dense, bfloat16, half of AdamW on the host": Case(
        "dense",
        BF16 | TWICE,
        optimizer=OFFLOADED,
        adam=True,
        like="dense, bfloat16, two steps",
        limit=LIMIT_BF16,
    ),
}

CONTROLS = (
    ("angles of another token", "dense"),
    ("angles of another token", "dense, full recomputation"),
    ("angles of another token", "dense, attention recomputed"),
    ("angles of another token", "moe"),
    ("angles of another token", "moe, selective recomputation"),
    ("experts chosen anew when recomputed", "moe, replay, full recomputation"),
    ("experts chosen anew when recomputed", "moe, replay, selective recomputation"),
    ("gate weights left out", "moe, replay with gates, full recomputation"),
    ("gate weights left out", "moe, replay with gates, selective recomputation"),
    ("angles of another token", "dp 2"),
    ("gradients after their bucket", "dp 2, overlapped"),
    ("weights gathered late", "dp 2, overlapped"),
    ("angles of another token", "dp 2, ep 2, replay"),
    ("gradients after their bucket", "dp 2, ep 2, replay, overlapped"),
    ("weights gathered late", "dp 2, ep 2, replay, overlapped"),
    ("norms' gradients of one rank alone", "tp 2"),
    ("inputs of one rank alone", "tp 2, moe"),
    ("gate weights left out", "tp 2, ep 2, replay with gates"),
    ("angles of the first rank", "cp 2"),
    ("keys of one rank alone", "cp 2, replay"),
    ("no gate in the activation", "dense, fused activation"),
    ("no gate in the activation", "moe, fused activation"),
    ("weights of another token", "moe, fused permutation"),
    ("weights of another token", "dp 2, ep 2, replay, fused permutation"),
    ("softmax over all experts", "moe, fused router"),
    ("angles of another token", "moe, balanced"),
    ("balanced by choices alone", "moe, balanced, fused router"),
    ("no residual", "dense, fused addition"),
    ("no residual", "moe, fused addition"),
    ("no bias correction", "dense, FusedAdam"),
    ("angles of another token", "dense, bfloat16"),
    ("angles of another token", "dense, bfloat16, two steps"),
    ("no bias correction", "dense, bfloat16, precision-aware"),
    ("remainders lost", "dense, bfloat16, precision-aware, remainders"),
    ("no bias correction", "dense, bfloat16, precision-aware, moments in bfloat16"),
    ("the half on the host stays", "dense, bfloat16, half of AdamW on the host"),
)
"""Faults of planted.py, and the cases in which each is planted and must be found."""


def control_name(fault: str, case: str) -> str:
    """What a control is called in the record."""
    return f"{fault} ({case})"
