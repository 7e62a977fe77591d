"""Bounds how large a server's reply may be, from what was asked: no reply is read further.

Generous: a whole reply of a sound server is a fraction of it, a flood is cut long before it fills
the memory.
"""

from __future__ import annotations

from sglang_bridge.protocol import RolloutRequest, ScoreRequest

# The envelope: names, finish reason, version spans.
BASE_BYTES = 1 << 20
# A token: its id, its row's length and path, its log-prob (12), and columns to come.
TOKEN_BYTES = 1 << 8
# An id: id, weight, log-prob (12), rounded up.
ID_BYTES = 16
# The experts of an input: 256 layers of 16 two-byte numbers.
EXPERT_BYTES = 8 << 10
# Their weights, of four bytes each.
GATE_BYTES = 16 << 10
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
