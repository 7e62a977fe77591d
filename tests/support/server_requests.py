"""Requests as a server's scheduler holds them."""

from types import SimpleNamespace

import numpy as np

from sglang_bridge import wire


def fake_request(**params: object) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params or None))


def score_request(
    start: int, lengths: list[int], ids: list[int], **more: object
) -> SimpleNamespace:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return fake_request(
        **{
            wire.SCORE_START: start,
            wire.SCORE_OFFSETS: wire.pack(offsets),
            wire.SCORE_IDS: wire.pack(np.array(ids, np.int32)),
            **more,
        }
    )
