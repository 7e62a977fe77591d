"""Estimates Costs from a recorded run: what each part would take if it had the machine to itself.

Servers tell what their forward passes took (sglang_bridge/work.py), the learner what an update
took. Where all parts run on one machine without GPUs these are CPU seconds, which do not grow while
others have the cores; elsewhere seconds of the clock. Every cost is a sum of known amounts (tokens,
requests, passes) times unknown seconds: least squares in which no number may be negative (Lawson
and Hanson's NNLS).

Not fitted: the learner's cost of long contexts (a run's batches hardly differ in it), which of its
data-parallel ranks gets the most tokens, and teachers one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from megatron_opd.config.schema import Config
from megatron_opd.metrics.timeline import CONTROLLER
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    RecordedLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.recording import CpuSeen, Recording, WorkSeen
from sglang_bridge.work import PassSums, ServerWork

Floats = npt.NDArray[np.float64]
AnyCost = TypeVar("AnyCost", EngineCost, ScoreCost)
LEAST_UPDATES = 8
LONG_CONTEXT = 512
"""Cached tokens of a request, on average, from which on reading them is told from the rest of a
step: with shorter ones it takes too little of it."""
UNDISTURBED = 0.1
"""Share of weight syncs, of which no CPU seconds are known, that is taken to have had a core."""
PASS, REQUESTS, TOKENS = range(3)  # the terms of PassSums


@dataclass(frozen=True, slots=True)
class Fit:
    """Holds what was fitted.

    errors: by part, the root of its passes' (the learner's: its updates') mean squared error, over
    that of the seconds themselves.
    """

    costs: Costs
    lengths: RecordedLengths
    errors: dict[str, float]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Says which seconds count. cpu: those of CPUs, of which all parts share `cores`."""

    cpu: bool
    cores: float | None

    def sums(self, passes: PassSums) -> tuple[Floats, float]:
        """Return the seconds of passes, by each of their amounts, and their squares."""
        if self.cpu:
            return np.array(passes.cpu), passes.cpu_squares
        return np.array(passes.busy), passes.busy_squares


def fit(recording: Recording, config: Config) -> Fit:
    """Estimate the costs of a run of `config`.

    ValueError, in one line: it is too short, or its time line lacks what servers did.
    """
    if len(recording.updates) < LEAST_UPDATES or not recording.syncs:
        raise ValueError(
            f"a run of at least {LEAST_UPDATES} updates and a weight sync is needed, "
            f"got {len(recording.updates)} and {len(recording.syncs)}"
        )
    done = {teaches: work_done(recording.works, teaches=teaches) for teaches in (False, True)}
    if not done[False].decode.gram[PASS]:
        raise ValueError(
            "the run's time line does not say what its servers did for at least two looks; "
            "record a longer one, with metrics.trace: true"
        )
    seconds = seconds_of(recording)
    engine, student_error = _engine(done[False], seconds, config)
    teacher, teacher_error = _teacher(done[True], seconds, config)
    learner, learner_error = _learner(recording, seconds, config.learner.parallel.dp)
    controller_s = 0.0
    if seconds.cpu:
        first, last = recording.cpus[0], recording.cpus[-1]
        engine = _with_front(engine, done[False], recording, teaches=False)
        teacher = _with_front(teacher, done[True], recording, teaches=True)
        ended = sum(r.requests for r in recording.rollouts if first.now_s < r.stop_s <= last.now_s)
        controller_s = (last.seconds[CONTROLLER] - first.seconds[CONTROLLER]) / max(ended, 1)
    costs = Costs(
        engine=engine,
        teachers=dict.fromkeys(config.all_teachers, teacher),
        learner=learner,
        sync=_sync(recording, seconds),
        controller_s=controller_s,
        host_cores=seconds.cores,
    )
    errors = {"student": student_error, "teacher": teacher_error, "learner": learner_error}
    return Fit(costs, recording.lengths, errors)


def seconds_of(recording: Recording) -> Seconds:
    """Return which seconds count: a machine is shared if all parts are on it, and no GPU is."""
    servers = {seen.server for seen in recording.works}
    here = bool(recording.cpus) and servers <= recording.cpus[-1].seconds.keys()
    if not here or any(update.cpu_s is None for update in recording.updates):
        return Seconds(cpu=False, cores=None)
    return Seconds(cpu=True, cores=recording.cpus[-1].cores)


def work_done(seen: Iterable[WorkSeen], *, teaches: bool) -> ServerWork:
    """Add up what the servers of the student, or of all teachers, did between two looks."""
    total = ServerWork()
    chosen = sorted((s for s in seen if s.teaches == teaches), key=lambda s: s.server)
    for _, one in groupby(chosen, key=lambda s: s.server):
        for before, after in pairwise(sorted(one, key=lambda s: s.now_s)):
            if is_restarted(before.work, after.work):
                total = total.combined(after.work)
            else:
                total = total.combined(after.work.since(before.work))
    return total


def is_restarted(before: ServerWork, after: ServerWork) -> bool:
    """Return whether a server that says `after` is another process than one that said `before`."""
    return any(
        later.gram[PASS] < earlier.gram[PASS]
        for earlier, later in (
            (before.decode, after.decode),
            (before.prefill, after.prefill),
        )
    )


def _engine(work: ServerWork, seconds: Seconds, config: Config) -> tuple[EngineCost, float]:
    """Estimate a decode step, and a prefill."""
    decode = work.decode
    terms = [PASS, REQUESTS, TOKENS]
    if decode.gram[TOKENS] < LONG_CONTEXT * decode.gram[REQUESTS]:
        terms.remove(TOKENS)
    step, error = solved(decode, terms, seconds)
    prefill, _ = solved(work.prefill, [PASS, REQUESTS, TOKENS], seconds)
    server = config.student
    cost = EngineCost(
        step_s=float(step[PASS]),
        step_request_s=float(step[REQUESTS]),
        step_cached_token_s=float(step[TOKENS]),
        prefill_s=float(prefill[PASS]),
        request_s=float(prefill[REQUESTS]),
        prefill_token_s=float(prefill[TOKENS]),
        max_running=server.max_running_requests,
        cache_tokens=server.max_total_tokens,
    )
    return cost, error


def _teacher(work: ServerWork, seconds: Seconds, config: Config) -> tuple[ScoreCost, float]:
    """Estimate a pass, a request and its tokens."""
    section = next(iter(config.all_teachers.values()), None)
    if section is None or not work.prefill.gram[PASS]:
        return ScoreCost(), 0.0
    found, error = solved(work.prefill, [PASS, REQUESTS, TOKENS], seconds)
    cost = ScoreCost(
        pass_s=float(found[PASS]),
        request_s=float(found[REQUESTS]),
        token_s=float(found[TOKENS]),
        max_running=section.max_running_requests,
    )
    return cost, error


def _with_front(cost: AnyCost, work: ServerWork, recording: Recording, *, teaches: bool) -> AnyCost:
    """Add what front ends take while their servers work: all but the passes themselves."""
    servers = {seen.server for seen in recording.works if seen.teaches == teaches}
    worked_s = work.decode.cpu[PASS] + work.prefill.cpu[PASS]
    used_s = sum(used(recording.cpus, server) for server in servers)
    if not worked_s:
        return cost
    return msgspec.structs.replace(cost, front_cores=max(0.0, used_s / worked_s - 1))


def used(cpus: Sequence[CpuSeen], part: str) -> float:
    """Return the CPU seconds that a part used between two looks, over all its processes."""
    seen = [each.seconds[part] for each in cpus if part in each.seconds]
    return sum(after - before if after >= before else after for before, after in pairwise(seen))


def _learner(recording: Recording, seconds: Seconds, ranks: int) -> tuple[LearnerCost, float]:
    """Estimate an update: a constant, and a rank's share of given and response tokens."""
    given = float(np.mean([r.given_tokens for r in recording.rollouts]))
    tokens = np.array([u.response_tokens + u.samples * given for u in recording.updates])
    took = [u.cpu_s if seconds.cpu else u.stop_s - u.start_s for u in recording.updates]
    # the first updates compile and fill caches
    later = slice(min(2, len(took) - 1), None)
    took_U = np.array(took, dtype=np.float64)[later]
    amounts = np.array([(1.0, share / ranks) for share in tokens])[later]
    found, error = least_squares(
        amounts.T @ amounts, amounts.T @ took_U, float(took_U @ took_U), float(took_U.sum())
    )
    return LearnerCost(update_s=float(found[0]), token_s=float(found[1]), ranks=ranks), error


def _sync(recording: Recording, seconds: Seconds) -> SyncCost:
    """Take the middle of the weight syncs; on shared cores those that others delayed least."""
    share = UNDISTURBED if seconds.cpu else 0.5
    whole_s = float(np.quantile([s.stop_s - s.start_s for s in recording.syncs], share))
    paused_s = float(np.quantile([s.resumed_s - s.paused_from_s for s in recording.syncs], share))
    return SyncCost(sync_s=whole_s, paused_s=min(whole_s, paused_s))


def solved(passes: PassSums, terms: Sequence[int], seconds: Seconds) -> tuple[Floats, float]:
    """Return the seconds of one pass, one request and one token, 0 for those not in `terms`."""
    gram = np.array(passes.gram).reshape(3, 3)
    moment, squares = seconds.sums(passes)
    chosen = np.ix_(terms, terms)
    total = float(moment[PASS])
    found = np.zeros(3)
    amounts = gram[PASS, terms]
    found[terms], error = least_squares(gram[chosen], moment[terms], squares, total, amounts)
    return found, error


def least_squares(
    gram: Floats, moment: Floats, squares: float, total: float, amounts: Floats | None = None
) -> tuple[Floats, float]:
    """Return seconds of one of each amount, none negative, and the relative error.

    gram, moment: the normal equations, A^T A and A^T y, where squares is y^T y and total the sum of
    y. amounts: the sums of A's columns; None: the first column is 1. The result is scaled to take
    that total: passes are many and their errors cancel, so a bias would not.
    """
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    values, vectors = np.linalg.eigh(gram / np.outer(scale, scale))
    roots = np.sqrt(np.maximum(values, 0.0))
    # a square root R of the gram, and z with R^T z = moment: |R x - z| is least where |A x - y| is
    root = roots[:, None] * vectors.T
    inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 1e-9)
    found, _ = nnls(root, inverse * (vectors.T @ (moment / scale)))
    found = found / scale
    predicted = float((gram[0] if amounts is None else amounts) @ found)
    if predicted > 0:
        found *= total / predicted
    rest = squares - 2 * float(found @ moment) + float(found @ gram @ found)
    return found, float(np.sqrt(max(rest, 0.0) / squares)) if squares else 0.0
