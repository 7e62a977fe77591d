"""Says what a data worker cannot have answered, by what it was asked and what is known.

A worker is one of the run's own processes. One that is faulty must not put figures into the run
that no sample has: order, bounds and advantages are made of them. Every function returns what is
impossible in one line, or None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megatron_opd.data_workers.messages import Generated, JudgedCall, Looked, ScoredCall
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.types import HeldRollout
from megatron_opd.rollout.score_requests import TeacherAsk
from sglang_bridge.arrays import LOGP_SLACK
from sglang_bridge.errors import one_line
from sglang_bridge.parse import MAX_IDS, Known, length_fault
from sglang_bridge.protocol import RolloutRequest

MOST_BYTES = 64
"""Most bytes that arrays hold of a token, or of a cached id; they hold a third of it."""

_ADDRESS = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]):([0-9]{1,5})")


def address_fault(address: str) -> str | None:
    """Check where learner ranks are to connect to: tcp://HOST:PORT."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return f"{one_line(repr(address), 80)} is no tcp://HOST:PORT"
    return None


def generated_fault(request: RolloutRequest, known: Known, answer: Generated) -> str | None:
    """Check the description of a completion. known: of its server."""
    tokens, most = answer.tokens, request.num_atoms + request.num_draws
    if tokens < 1:
        return f"a response of {tokens} tokens"
    fault = length_fault(
        tokens, answer.finish_reason, request.max_new_tokens, len(request.input_ids), known
    )
    if fault is not None:
        return fault
    if answer.finish_reason == "stop_string" and not request.stop:
        return "it stopped at a string, and none was asked for"
    if not -math.inf < answer.geometric_logp <= LOGP_SLACK:
        return f"a mean log-prob of {answer.geometric_logp}"
    fault = _spans_fault(answer.spans, tokens)
    if fault is not None:
        return fault
    # a path alone weighs 1; otherwise it may be there besides what was selected
    widest = 1 + most if most else 1
    return _size_fault(tokens, answer.ids, answer.size, widest, most or 1)


def judged_fault(answer: JudgedCall) -> str | None:
    """Check the reward of a response whose task has a verifier."""
    if answer.reward is None or not 0 <= answer.reward <= 1:
        return f"a reward of {answer.reward}"
    return None


def scored_fault(rollout: HeldRollout, ask: TeacherAsk, answer: ScoredCall) -> str | None:
    """Check the description of a scored sample. rollout: as it was before."""
    tokens, most = rollout.num_response_tokens, ask.num_atoms + ask.num_draws
    fault = _shape_fault(answer.shape, tokens)
    if fault is not None:
        return fault
    if not most:  # nothing but the scores is new
        same = (answer.ids, answer.size) == (rollout.num_ids, rollout.cache)
        return None if same else f"{answer.ids} scored ids where {rollout.num_ids} are cached"
    return _size_fault(tokens, answer.ids, answer.size, 1 + most, most)


def looked_fault(answer: Looked) -> str | None:
    """Check how far a server is said to be."""
    fewest = min(answer.tokens.values(), default=0)
    return f"a request of {fewest} tokens" if fewest < 0 else None


def _spans_fault(spans: Sequence[tuple[int, int, int]], tokens: int) -> str | None:
    edges = [0, *(stop for _, _, stop in spans)]
    covers = edges[-1] == tokens and all(
        start == edge < stop for (_, start, stop), edge in zip(spans, edges[:-1], strict=True)
    )
    versions = [version for version, _, _ in spans]
    known = covers and versions[0] >= 0 and versions[-1] < MAX_IDS
    if known and versions == sorted(versions):
        return None
    return f"versions that do not cover {tokens} tokens, or fall: {one_line(str(spans), 80)}"


def _size_fault(tokens: int, ids: int, size: CacheSize, widest: int, most: int) -> str | None:
    """Check a cache. widest: ids of a row at most; most: of those, how many may have a weight."""
    if not tokens <= ids <= tokens * widest:
        return f"{ids} cached ids of {tokens} tokens, at most {widest} each"
    if not tokens <= size.selected_ids <= min(ids, tokens * most):
        return f"{size.selected_ids} of {ids} cached ids have a weight"
    if not 0 < size.nbytes <= MOST_BYTES * (tokens + ids + 1):
        return f"{size.nbytes} bytes for {tokens} tokens and {ids} cached ids"
    return None


def _shape_fault(shape: ScoreShape, tokens: int) -> str | None:
    sound = (
        shape.rows == tokens
        and -math.inf < shape.mean <= LOGP_SLACK
        and 0 <= shape.squares < math.inf
        and 0 <= shape.near_uniform <= tokens
    )
    return None if sound else f"scores that cannot be of {tokens} tokens: {shape}"
