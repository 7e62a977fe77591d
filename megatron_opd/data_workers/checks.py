"""Says what a data worker cannot have answered, by what it was asked and what is known.

A worker is one of the run's own processes. One that is faulty must not put figures into the run
that no sample has: order, bounds and advantages are made of them. Every function returns what is
impossible in one line, or None.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_opd.config.schema import Config
from megatron_opd.data_workers.messages import (
    Generated,
    JudgedCall,
    Looked,
    ScoredCall,
    TrajectoryStep,
    TurnSampled,
    WantedTurn,
    WholeTrajectory,
)
from megatron_opd.environments.trajectory import TrajectoryLimits, trajectory_limits
from megatron_opd.records.runs import runs_fault
from megatron_opd.records.sample_figures import CacheSize, ScoreShape
from megatron_opd.records.turn_faults import turns_fault
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


def turn_fault(answer: TurnSampled) -> str | None:
    """Check what is said of a turn; one without a token is dropped by its worker."""
    tokens = answer.tokens
    return _spans_fault(answer.spans, tokens) if tokens or answer.spans else None


@dataclass(frozen=True, slots=True)
class PlayedRules:
    """Says what a trajectory of this run can be.

    widest: cached ids of a token at most, the path's included. most: of those, how many may have a
    weight.
    """

    limits: TrajectoryLimits
    widest: int
    most: int

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> Self:
        """Return those of a run with an environment. vocab_size: of the student."""
        assert config.environment is not None, "trajectories have an environment"
        support, most = config.estimator.support, 0
        if support.owner == "student":
            most = support.num_atoms(vocab_size) + support.num_draws
        limits = trajectory_limits(config.environment, config.rollout.max_new_tokens)
        return cls(limits, 1 + most, most or 1)


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """Says what is known of a turn that a server has sampled. spans: see RolloutReply."""

    tokens: int
    spans: tuple[tuple[int, int, int], ...]
    url: str


def step_fault(
    rules: PlayedRules, known: Sequence[KnownTurn], answer: TrajectoryStep
) -> str | None:
    """Check the description of a trajectory that is whole. known: all that it can consist of."""
    whole = answer.step
    if isinstance(whole, WantedTurn):
        return None
    tokens = sum(run.num_tokens for run in whole.runs)
    ids = sum(size.ids for size in whole.sizes)
    return (
        _layout_fault(rules.limits, whole)
        or turns_fault(whole.runs, whole.turns, whole.reward)
        or _cover_fault(whole.spans, tokens)
        or _origin_fault(whole, known)
        or _size_fault(tokens, ids, whole.size, rules.widest, rules.most)
    )


def _layout_fault(limits: TrajectoryLimits, whole: WholeTrajectory) -> str | None:
    """Check sequences and runs, and how it ended."""
    fault = runs_fault([size.tokens for size in whole.sizes], whole.runs)
    if fault is not None:
        return fault
    for sequence, size in enumerate(whole.sizes):
        sampled = sum(run.num_tokens for run in whole.runs if run.sequence == sequence)
        if size.sampled != sampled:
            return f"sequence {sequence} of {size.sampled} sampled tokens, its runs have {sampled}"
        if size.ids < sampled:
            return f"{size.ids} cached ids of {sampled} tokens"
    longest, sampled = max(size.tokens for size in whole.sizes), sum(s.sampled for s in whole.sizes)
    if longest > limits.max_tokens or sampled > limits.most_sampled:
        return f"a sequence of {longest} tokens, {sampled} sampled ones in all"
    if len(whole.sizes) > limits.max_sequences:
        return f"a trajectory of {len(whole.sizes)} sequences"
    if whole.finish_reason not in ("stop", "length") or whole.restarts < 0:
        ended = one_line(repr(whole.finish_reason), 40)
        return f"a trajectory that ended by {ended}, after {whole.restarts} restarts"
    means = whole.geometric_logps
    if len(means) != len(whole.sizes) or not all(-math.inf < m <= LOGP_SLACK for m in means):
        return f"mean log-probs of {one_line(str(means), 80)}"
    return None


def _origin_fault(whole: WholeTrajectory, known: Sequence[KnownTurn]) -> str | None:
    """Check that its turns are some of those that servers have sampled, each once."""
    left = Counter((turn.tokens, _joined(turn.spans)) for turn in known)
    at = 0
    for run in whole.runs:
        stop = at + run.num_tokens
        own = [(v, max(a, at) - at, min(b, stop) - at) for v, a, b in whole.spans]
        turn = run.num_tokens, _joined([span for span in own if span[1] < span[2]])
        if not left[turn]:
            return f"a turn of {one_line(str(turn), 80)}, which no server has sampled"
        left[turn] -= 1
        at = stop
    if whole.engine not in {turn.url for turn in known}:
        return f"{one_line(repr(whole.engine), 80)} as a server that sampled it"
    return None


def _joined(spans: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return spans of which no two neighbours have the same version."""
    found: list[tuple[int, int, int]] = []
    for version, start, stop in spans:
        if found and found[-1][0] == version:
            start = found.pop()[1]
        found.append((version, start, stop))
    return tuple(found)


def scored_fault(
    rollout: HeldRollout, ask: TeacherAsk, sequence: int, answer: ScoredCall
) -> str | None:
    """Check the description of a sequence that was scored. rollout: as it was before."""
    size, most, step = rollout.sizes[sequence], ask.num_atoms + ask.num_draws, ask.step
    if step is not None:  # what a mixture draws is there at its end
        most = step.draws if step.last else 0
    mixed = rollout.prompt.mixture if step is not None and step.last else ()
    fault = shape_fault(answer.shape, size.sampled, [name for name, _ in mixed])
    if fault is not None:
        return fault
    if not most:  # nothing but the scores is new
        same = (answer.ids, answer.size) == (size.ids, rollout.cache)
        return None if same else f"{answer.ids} scored ids where {size.ids} are cached"
    if not size.sampled <= answer.ids <= size.sampled * (1 + most):
        return f"{answer.ids} cached ids of {size.sampled} tokens, at most {1 + most} each"
    tokens, ids = rollout.num_response_tokens, rollout.num_ids - size.ids + answer.ids
    return _size_fault(tokens, ids, answer.size, 1 + most, most)


def looked_fault(answer: Looked) -> str | None:
    """Check how far a server is said to be."""
    fewest = min(answer.tokens.values(), default=0)
    return f"a request of {fewest} tokens" if fewest < 0 else None


def _cover_fault(spans: Sequence[tuple[int, int, int]], tokens: int) -> str | None:
    """Check versions of several turns, each of which may have a server of its own."""
    edges = [0, *(stop for _, _, stop in spans)]
    covers = edges[-1] == tokens and all(
        start == edge < stop for (_, start, stop), edge in zip(spans, edges[:-1], strict=True)
    )
    if covers and all(0 <= version < MAX_IDS for version, _, _ in spans):
        return None
    return f"versions that do not cover {tokens} tokens: {one_line(str(spans), 80)}"


def _spans_fault(spans: Sequence[tuple[int, int, int]], tokens: int) -> str | None:
    versions = [version for version, _, _ in spans]
    if _cover_fault(spans, tokens) is None and versions == sorted(versions):
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


def shape_fault(shape: ScoreShape, tokens: int, mixed: Sequence[str] = ()) -> str | None:
    """Check the description of scores. mixed: the teachers that it has parts of."""
    sound = [name for name, _ in shape.parts] == list(mixed)
    sound = sound and all(shape_fault(part, tokens) is None for _, part in shape.parts)
    sound = sound and (
        shape.rows == tokens
        and -math.inf < shape.mean <= LOGP_SLACK
        and 0 <= shape.squares < math.inf
        and 0 <= shape.near_uniform <= tokens
    )
    return None if sound else f"scores that cannot be of {tokens} tokens: {shape}"
