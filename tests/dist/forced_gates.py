"""transformers in float64 with given experts, and on request given weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.dist import caches
from tests.support.models import tiny_qwen3_moe

EXPERTS, TOPK, MOE_LAYERS = 8, 3, 3


def both_ways_of_normalising(base: Path) -> dict[str, Path]:
    """Two models, each with a layer without experts between those that have them."""
    shape = {"num_hidden_layers": 4, "mlp_only_layers": [1]}
    shape |= {"num_experts": EXPERTS, "num_experts_per_tok": TOPK}
    return {
        "post": tiny_qwen3_moe(base / "post", seed=4, norm_topk_prob=True, **shape),
        "pre": tiny_qwen3_moe(base / "pre", seed=5, norm_topk_prob=False, **shape),
    }


class ForcedGates:
    """Routers follow the sample's experts: its last token has none, and no say.

    weighs: their weights have the sample's values and the router's own derivative.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, weighs: bool = False) -> None:
        self.experts_XLk: Any = np.empty(0)
        self.gates_XLk: Any = None
        response_logp = caches.response_logp
        gates: dict[int, int] = {}

        def forward(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probs = torch.softmax(logits, -1)
            used = probs.topk(gate.top_k).indices
            layer = gates.setdefault(id(gate), len(gates))
            given = torch.as_tensor(self.experts_XLk[:, layer].astype(np.int64))
            used = torch.cat([given, used[len(given) :]])
            chosen = probs.gather(1, used)
            if gate.norm_topk_prob:
                chosen = chosen / chosen.sum(-1, keepdim=True)
            if self.gates_XLk is not None:
                value = chosen.detach().clone()
                value[: len(given)] = torch.as_tensor(self.gates_XLk[:, layer].astype(np.float64))
                chosen = chosen + (value - chosen).detach()
            return logits, chosen, used

        def of_sample(model: Any, sample: Any, temperature: float = 1.0) -> torch.Tensor:
            self.experts_XLk = sample.rollout.experts_XLk
            self.gates_XLk = sample.rollout.gates_XLk if weighs else None
            return response_logp(model, sample, temperature)

        patch.setattr(Qwen3MoeTopKRouter, "forward", forward)
        patch.setattr(caches, "response_logp", of_sample)
