"""Requests as a server's scheduler holds them."""

from types import SimpleNamespace

import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server.text import to_text


def fake_request(**params: object) -> SimpleNamespace:
    """It asks for no log-probs of SGLang's."""
    sampling = SimpleNamespace(custom_params=params or None)
    return SimpleNamespace(sampling_params=sampling, return_logprob=False)


def request_of(**params: object) -> SimpleNamespace:
    request = fake_request(**params)
    request.origin_input_ids = [1, 2]
    return request


def score_request(
    position: int, lengths: list[int], ids: list[int], **more: object
) -> SimpleNamespace:
    """Of one run, whose first row is scored at `position`."""
    return scored_request([(position + 1, position + 1 + len(lengths))], lengths, ids, **more)


def scoring_batch(
    requests: list, prefixes: list[int], extends: list[int], starts: list[int]
) -> SimpleNamespace:
    """A prefill of these requests; starts: of SGLang's logits, counted from each prefix."""
    return SimpleNamespace(
        reqs=requests,
        prefix_lens=prefixes,
        extend_lens=extends,
        extend_logprob_start_lens=starts,
    )


def scored_request(
    runs: list[tuple[int, int]], lengths: list[int], ids: list[int], **more: object
) -> SimpleNamespace:
    request = fake_request(
        **{
            wire.SCORE_RUNS: to_text(pack(np.array(runs, np.int32))),
            wire.SCORE_LENGTHS: to_text(pack(np.array(lengths, np.int32))),
            wire.SCORE_IDS: to_text(pack(np.array(ids, np.int32))),
            **more,
        }
    )
    request.return_logprob = True
    return request
