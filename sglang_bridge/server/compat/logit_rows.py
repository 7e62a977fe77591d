"""Lets a prefill compute the logits of chosen positions alone, and no log-probs of SGLang's own.

SGLang computes logits of all positions from a request's logprob_start_len on, and from each the
log-prob of the next id: a copy of the logits and a pass over it. Whoever reads logits as they are
made needs neither. Its accounts count a log-prob for every position, so that zeros stand for them.

Axes: L logit rows as SGLang offers them, H hidden numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_bridge.server.transfer import to_device


def computed(
    chosen_L: np.ndarray,
    original: Callable[..., tuple[Any, torch.Tensor]],
    processor: Any,
    states_LH: torch.Tensor,
    *,
    sample_indices: torch.Tensor,
    input_logprob_indices: torch.Tensor,
    token_to_seq_idx: Sequence[int],
    logits_metadata: Any,
    **kwargs: Any,
) -> tuple[Any, torch.Tensor]:
    """Returns what InputLogprobProcessor.forward (`original`) returns, from rows chosen_L alone.

    chosen_L: rising, the rows that are sampled from among them. Raises RuntimeError when SGLang
    offers other rows than they were chosen of.
    """
    offered, device = states_LH.shape[0], states_LH.device
    if chosen_L[-1] + 1 != offered:
        raise RuntimeError(f"chose of {chosen_L[-1] + 1} logit rows, SGLang offers {offered}")
    if len(chosen_L) < offered:
        states_LH = states_LH[to_device(chosen_L, device)]
    sampled = np.searchsorted(chosen_L, logits_metadata.sample_indices_cpu)
    found, sampled_logits = original(
        processor,
        states_LH,
        sample_indices=to_device(sampled, device),
        input_logprob_indices=input_logprob_indices[:0],
        token_to_seq_idx=[token_to_seq_idx[row] for row in chosen_L],
        logits_metadata=dataclasses.replace(
            logits_metadata, sample_indices_cpu=sampled.tolist(), input_logprob_indices_cpu=[]
        ),
        **kwargs,
    )
    zeros = torch.zeros(input_logprob_indices.shape)
    return dataclasses.replace(found, token_logprobs=zeros), sampled_logits
