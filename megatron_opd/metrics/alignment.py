"""Says how much of a batch a teacher of another tokenizer has scored (scoring.alignment)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_opd.metrics.types import Mean
from megatron_opd.records.types import AnySample, Sample
from sglang_bridge.protocol import DrawCache


def alignment_columns(samples: Sequence[AnySample]) -> dict[str, float]:
    """Return the columns of samples whose teacher has another tokenizer; none where it is one.

    aligned_token_fraction, aligned_mass_fraction: over sampled tokens, see scored_shares.
    """
    tokens, mass = Mean(), Mean()
    for sample in samples:
        if not isinstance(sample, Sample) or sample.aligned is None:
            continue
        share, weight = scored_shares(sample.rollout.draws)
        tokens.add(share, sample.rollout.num_response_tokens)
        mass.add(weight, sample.rollout.num_response_tokens)
    if tokens.value is None or mass.value is None:
        return {}
    return {"aligned_token_fraction": tokens.value, "aligned_mass_fraction": mass.value}


def scored_shares(draws: DrawCache) -> tuple[float, float]:
    """Return (share of tokens, share of the cache's weight a token) that have scores.

    A token has one where any of its ids has. The second is the mass of the sampler's distribution,
    estimated by the draws, or that of the likeliest ids where they are all that is cached.
    """
    weight_T = np.add.reduceat(draws.weight_N.astype(np.float64), draws.offsets_T1[:-1])
    return float((weight_T > 0).mean()), float(weight_T.mean())
