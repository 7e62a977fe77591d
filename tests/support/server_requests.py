"""Requests as a server's scheduler holds them."""

from types import SimpleNamespace

import numpy as np

from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server.text import to_text


def fake_request(**params: object) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params or None))


def request_of(**params: object) -> SimpleNamespace:
    request = fake_request(**params)
    request.origin_input_ids = [1, 2]
    return request


def score_request(
    start: int, lengths: list[int], ids: list[int], **more: object
) -> SimpleNamespace:
    return fake_request(
        **{
            wire.SCORE_START: start,
            wire.SCORE_LENGTHS: to_text(pack(np.array(lengths, np.int32))),
            wire.SCORE_IDS: to_text(pack(np.array(ids, np.int32))),
            **more,
        }
    )
