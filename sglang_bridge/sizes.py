"""Bounds how large a server's reply may be, from what was asked: no reply is read further.

Generous: a whole reply of a sound server is a fraction of it, a flood is cut long before it fills
the memory.
"""

from __future__ import annotations

from sglang_bridge.protocol import RolloutRequest, ScoreRequest

# The envelope: names, finish reason, version spans.
BASE_BYTES = 1 << 20
# A token in JSON: its id, its share of the text (a character escaped costs 12 bytes), and the
# log-prob entry that SGLang adds to a scored one.
TOKEN_BYTES = 1 << 10
# An id in base64: id, weight, log-prob (16), rounded up.
ID_BYTES = 24
# The experts of an input in base64: 256 layers of 16 two-byte numbers are 10,923.
EXPERT_BYTES = 12 << 10
# Their weights, of four bytes each: 21,846.
GATE_BYTES = 24 << 10
# Every slice of every weight of every rank: 200 bytes each, a million of them.
DIGEST_BYTES = 256 << 20


def rollout_bytes(request: RolloutRequest) -> int:
    """Returns the largest size of a reply to a request for one completion."""
    row = request.num_atoms + request.num_draws + 1
    size = BASE_BYTES + request.max_new_tokens * (TOKEN_BYTES + row * ID_BYTES)
    inputs = len(request.input_ids) + request.max_new_tokens
    return size + inputs * (EXPERT_BYTES * request.experts + GATE_BYTES * request.gates)


def score_bytes(request: ScoreRequest) -> int:
    """Returns the largest size of a reply to a request for scores."""
    row = request.num_atoms + request.num_draws
    rows = request.num_tokens * (TOKEN_BYTES + row * ID_BYTES)
    return BASE_BYTES + rows + len(request.ids_N) * ID_BYTES
