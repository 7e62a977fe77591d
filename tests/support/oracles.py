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


def thin_draws(logp_V: np.ndarray, num_atoms: int, num_draws: int) -> set[int]:
    """ceil(num_draws * tail mass): two counts where rounding may decide between them."""
    tail_mass = np.exp(np.sort(logp_V)[: max(len(logp_V) - num_atoms, 0)]).sum()
    return {int(np.ceil(num_draws * tail_mass + slack)) for slack in (-3e-5, 3e-5)}


def selection_error(
    logp_V: np.ndarray, ids: np.ndarray, weight: np.ndarray, num_atoms: int, num_draws: int
) -> float:
    """Largest relative error of a row's weights as num_atoms atoms and num_draws tail draws.

    inf where the row is no such selection: a likeliest id is missing, an id of probability 0 is in
    it, or the draws are not num_draws. Two ids within 3e-5 nats may be ordered either way.
    """
    members, weight = ids[weight > 0], weight[weight > 0].astype(np.float64)
    order = np.argsort(-logp_V[members], kind="stable")
    members, weight = members[order], weight[order]
    held = min(num_atoms, int(np.isfinite(logp_V).sum()))
    others_V = np.delete(logp_V, members[:held])
    if len(members) < held or not np.isfinite(logp_V[members]).all():
        return np.inf
    if held and others_V.max(initial=-np.inf) > logp_V[members[held - 1]] + 3e-5:
        return np.inf
    errors = np.abs(weight[:held] / np.exp(logp_V[members[:held]]) - 1)
    tail_mass = np.exp(others_V).sum()
    if num_draws == 0 or tail_mass == 0:
        return float(errors.max(initial=0)) if len(members) == held else np.inf
    hits = weight[held:] * num_draws / tail_mass
    if np.rint(hits).sum() != num_draws or (np.rint(hits) < 1).any():
        return np.inf
    return float(max(errors.max(initial=0), np.abs(hits / np.rint(hits) - 1).max()))
