"""Slow, obvious references in float64 for what the servers compute."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load_reference(path: Path) -> torch.nn.Module:
    """The checkpoint under transformers, float32, for `reference_logits`."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(
    model: torch.nn.Module,
    input_ids: list[int],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> np.ndarray:
    """float64 [positions, V] logits; `weights`, if given, replace the model's own."""
    ids = torch.tensor([input_ids])
    if weights is None:
        output = model(ids)
    else:
        output = torch.func.functional_call(model, dict(weights), (ids,))
    return output.logits[0].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def behaviour_logp(
    logits_V: np.ndarray, temperature: float = 1.0, top_p: float = 1.0
) -> np.ndarray:
    """Log of the sampling distribution: tempered, cut to the top-p nucleus, renormalised."""
    logp_V = log_softmax(logits_V / temperature)
    order_V = np.argsort(-logp_V, kind="stable")
    mass_V = np.exp(logp_V[order_V])
    kept_V = (np.cumsum(mass_V) - mass_V) <= top_p
    out_V = np.full_like(logp_V, -np.inf)
    kept = order_V[kept_V]
    out_V[kept] = logp_V[kept] - np.log(np.exp(logp_V[kept]).sum())
    return out_V


def chi_square_per_df(counts_V: np.ndarray, probs_V: np.ndarray) -> tuple[float, int]:
    """(chi-square / degrees of freedom, degrees of freedom), ids expected under 5 times pooled."""
    expected_V = probs_V * counts_V.sum()
    large_V = expected_V >= 5
    observed = np.append(counts_V[large_V], counts_V[~large_V].sum())
    expected = np.append(expected_V[large_V], expected_V[~large_V].sum())
    used = expected > 0
    assert observed[~used].sum() == 0, "an id of probability 0 was drawn"
    df = int(used.sum()) - 1
    return float((((observed - expected) ** 2)[used] / expected[used]).sum() / df), df
