"""Estimates Costs from a recorded run: what each part would take if it had the machine to itself.

Every cost is a sum of known amounts (tokens, requests, steps) times unknown seconds, so each part
is a least-squares problem in which no number may be negative (Lawson and Hanson's NNLS). The cores
that the parts share are the one number that is searched: the one whose fit is best.

Not fitted: the learner's cost of long contexts (a run's batches hardly differ in it), and which of
its data-parallel ranks gets the most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from megatron_opd.config.schema import Config
from megatron_opd.metrics.intervals import BusyTime
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    RecordedLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.occupancy import Occupancy, Running, begun, occupancy_of
from megatron_opd.sim.recording import Recording

Floats = npt.NDArray[np.float64]
LEAST_UPDATES = 8
LONG_CONTEXT = 512
"""Cached tokens of a request, on average, from which on reading them is told from the rest of a
step: with shorter ones it takes too little of it."""
TOGETHER = np.eye(5)
TOGETHER[1, 4] = 1.0
"""A token takes no more time in a prefill than in a decode step: what is unknown is the prefill's,
and how much more the step's is. Runs whose prompts are alike could not tell them apart."""
ROUNDS = 3
"""How often the rate of sampling, which weighs the pieces of a rollout, is computed anew."""
MOST_CORES, COARSE, FINE = 4.0, 0.25, 0.05
"""The cores that are tried: first far apart, then close to the best of those."""
LEAST_GAIN = 1e-4
"""Error that shared cores must explain: less is rounding, of a run whose parts never overlap."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Holds what was fitted. errors: relative error of each part's times, by its name."""

    costs: Costs
    lengths: RecordedLengths
    errors: dict[str, float]

    @property
    def error(self) -> float:
        """Returns the sum of the errors of all parts."""
        return sum(self.errors.values())


def fit(recording: Recording, config: Config) -> Fit:
    """Estimate the costs of a run of `config`. ValueError, in one line: it is too short."""
    if len(recording.updates) < LEAST_UPDATES or not recording.syncs:
        raise ValueError(
            f"a run of at least {LEAST_UPDATES} updates and a weight sync is needed, "
            f"got {len(recording.updates)} and {len(recording.syncs)}"
        )
    running = begun(recording.rollouts, config.student.max_running_requests)
    teachers = sum(section.servers for section in config.all_teachers.values())
    ranks = config.learner.parallel.dp
    occupancy = occupancy_of(recording, running.values(), max(teachers, 1), ranks)

    def tried(cores: float | None) -> Fit:
        return _fit(recording, config, running, occupancy, cores)

    own = tried(None)
    if config.cluster.type != "local":  # parts on hosts of their own share nothing
        return own
    coarse = best([own, *map(tried, _steps(1.0, MOST_CORES, COARSE))])
    near = coarse.costs.host_cores
    if near is None or own.error - coarse.error < LEAST_GAIN:
        return own
    return best([coarse, *map(tried, _steps(max(1.0, near - COARSE), near + COARSE, FINE))])


def best(fits: Sequence[Fit]) -> Fit:
    """Return the fit whose errors are smallest, over all parts."""
    return min(fits, key=lambda found: found.error)


def _steps(start: float, stop: float, step: float) -> list[float]:
    return [float(x) for x in np.arange(start, stop + step / 2, step)]


def _fit(
    recording: Recording,
    config: Config,
    running: dict[str, list[Running]],
    occupancy: Occupancy,
    cores: float | None,
) -> Fit:
    """Estimate everything, with so many cores to share."""
    speed_S = occupancy.speed_S(cores)
    clock = WorkClock(occupancy.edge_S1, speed_S)
    errors: dict[str, float] = {}
    tokens_of = {span.uid: span.tokens for span in recording.rollouts}
    engine, errors["student"] = _engine(running, occupancy, speed_S, config)
    servers = WorkClock(occupancy.edge_S1, speed_S * occupancy.scoring_S)
    teacher, errors["teacher"] = _teacher(recording, tokens_of, servers, config)
    learner, errors["learner"] = _learner(recording, clock, config.learner.parallel.dp)
    return Fit(
        Costs(
            engine=engine,
            teachers=dict.fromkeys(config.all_teachers, teacher),
            learner=learner,
            sync=_sync(recording, clock),
            host_cores=cores,
        ),
        recording.lengths,
        errors,
    )


class WorkClock:
    """Turns seconds of the clock into seconds of work, at speed_S in pieces with edges edge_S1."""

    def __init__(self, edge_S1: Floats, speed_S: Floats) -> None:
        self._edge_S1 = edge_S1
        self._work_S1 = np.concatenate([[0.0], np.cumsum(np.diff(edge_S1) * speed_S)])

    def seconds(self, start_s: float, stop_s: float) -> float:
        """Return the work done from start to stop."""
        first, last = np.interp([start_s, stop_s], self._edge_S1, self._work_S1)
        return float(last - first)


def _engine(
    running: dict[str, list[Running]], occupancy: Occupancy, speed_S: Floats, config: Config
) -> tuple[EngineCost, float]:
    """Estimate steps and prefills: a rollout takes its tokens' steps, and all prefills."""
    amounts: list[Floats] = []
    seconds: list[Floats] = []
    step = np.array([1.0, 0.0, 0.0])
    again = config.schedule.in_flight == "in_place"
    for round_ in range(ROUNDS):
        amounts, seconds = [], []
        for one in running.values():
            rows_R5, work_R = _work_of(one, occupancy, speed_S, step, again=again)
            amounts.append(rows_R5)
            seconds.append(work_R)
        amounts_R5 = np.concatenate(amounts)
        if amounts_R5[:, 2].sum() < LONG_CONTEXT * amounts_R5[:, 1].sum():
            amounts_R5[:, 2] = 0.0
        found, error = _solved(amounts_R5 @ TOGETHER, np.concatenate(seconds))
        found = TOGETHER @ found
        if round_ < ROUNDS - 1 and found[:3].any():
            step = found[:3]
    step_s, step_request_s, step_cached_token_s, request_s, prefill_token_s = map(float, found)
    server = config.student
    cost = EngineCost(
        step_s=step_s,
        step_request_s=step_request_s,
        step_cached_token_s=step_cached_token_s,
        request_s=request_s,
        prefill_token_s=prefill_token_s,
        max_running=server.max_running_requests,
        cache_tokens=server.max_total_tokens,
    )
    return cost, error


def _work_of(
    running: Sequence[Running],
    occupancy: Occupancy,
    speed_S: Floats,
    step: Floats,
    *,
    again: bool,
) -> tuple[Floats, Floats]:
    """Return what an engine did for each of R rollouts, and how long it worked on it.

    Amounts [R, 5]: steps; requests and cached tokens summed over the steps; prefills; their tokens.
    step: seconds of a step, a request and a cached token in it, as far as they are known. again:
    whether responses go on after a pause, with a cache that is computed anew.
    """
    edge_S1 = occupancy.edge_S1
    length_S = np.diff(edge_S1)
    middle_S = edge_S1[:-1] + length_S / 2
    work_S = length_S * speed_S * ~occupancy.paused_S
    count_S1, fixed_S1, growth_S1 = (np.zeros(len(edge_S1)) for _ in range(3))
    arrivals_S1, prompts_S1 = np.zeros(len(edge_S1)), np.zeros(len(edge_S1))
    bounds = [occupancy.pieces(r.began_s, r.span.stop_s) for r in running]
    for r, piece in zip(running, bounds, strict=True):
        # its tokens come evenly: prompt + T (t - began) / seconds are cached at t
        rate = r.span.response_tokens / max(r.seconds, 1e-9)
        for at, sign in ((piece.start, 1.0), (piece.stop, -1.0)):
            count_S1[at] += sign
            fixed_S1[at] += sign * (r.span.prompt_tokens - rate * r.began_s)
            growth_S1[at] += sign * rate
        arrivals_S1[piece.start] += 1
        prompts_S1[piece.start] += r.span.prompt_tokens
    count_S = np.cumsum(count_S1)[:-1]
    cached_S = np.cumsum(fixed_S1)[:-1] + np.cumsum(growth_S1)[:-1] * middle_S
    if again:  # what a pause found running was computed anew when it ended
        stops, goes_on = occupancy.pauses()
        arrivals_S1[goes_on] += count_S[stops]
        prompts_S1[goes_on] += cached_S[stops]
    rate_S = work_S / np.maximum(step @ np.stack([np.ones_like(count_S), count_S, cached_S]), 1e-12)
    rows, seconds = np.zeros((len(running), 5)), np.zeros(len(running))
    for i, (r, piece) in enumerate(zip(running, bounds, strict=True)):
        tokens = r.span.response_tokens
        share_S = rate_S[piece] / max(float(rate_S[piece].sum()), 1e-12)
        rows[i] = (
            tokens,
            tokens * float(count_S[piece] @ share_S),
            tokens * float(cached_S[piece] @ share_S),
            arrivals_S1[piece].sum(),
            prompts_S1[piece].sum(),
        )
        seconds[i] = work_S[piece].sum()
    return rows, seconds


def _teacher(
    recording: Recording,
    tokens_of: dict[int, int],
    servers: WorkClock,
    config: Config,
) -> tuple[ScoreCost, float]:
    """Estimate a request and its tokens: in a stretch without a gap servers did all of it.

    servers: adds up the work of all that had a request.
    """
    section = next(iter(config.all_teachers.values()), None)
    busy = BusyTime((s.start_s, s.stop_s) for s in sorted(recording.scores, key=lambda s: s.stop_s))
    edges = np.array([start for start, _ in busy.intervals])
    amounts = np.zeros((len(edges), 2))
    for score in recording.scores:
        stretch = int(np.searchsorted(edges, score.start_s, side="right")) - 1
        amounts[stretch] += (1, tokens_of.get(score.uid, 0))
    seconds = np.array([servers.seconds(*interval) for interval in busy.intervals])
    if section is None or not len(seconds):
        return ScoreCost(), 0.0
    (request_s, token_s), error = _solved(amounts, seconds)
    cost = ScoreCost(
        request_s=float(request_s),
        token_s=float(token_s),
        max_running=section.max_running_requests,
    )
    return cost, error


def _learner(recording: Recording, clock: WorkClock, ranks: int) -> tuple[LearnerCost, float]:
    """Estimate an update: a constant, and a rank's share of prompt and response tokens."""
    prompt = float(np.mean([r.prompt_tokens for r in recording.rollouts]))
    tokens = np.array([u.response_tokens + u.samples * prompt for u in recording.updates])
    seconds = np.array([clock.seconds(u.start_s, u.stop_s) for u in recording.updates])
    # the first updates compile and fill caches
    later = slice(min(2, len(seconds) - 1), None)
    amounts = np.array([(1.0, share / ranks) for share in tokens])
    (update_s, token_s), error = _solved(amounts[later], seconds[later])
    return LearnerCost(update_s=float(update_s), token_s=float(token_s), ranks=ranks), error


def _sync(recording: Recording, clock: WorkClock) -> SyncCost:
    """Average the weight syncs."""
    seconds = [clock.seconds(s.start_s, s.stop_s) for s in recording.syncs]
    paused = [clock.seconds(s.paused_from_s, s.resumed_s) for s in recording.syncs]
    whole_s = float(np.median(seconds))
    return SyncCost(sync_s=whole_s, paused_s=min(whole_s, float(np.median(paused))))


def _solved(amounts: Floats, seconds: Floats) -> tuple[Floats, float]:
    """Return seconds of one of each amount, none negative, and the relative error (mean square).

    All together they take as long as what was measured: a fit of relative errors would lean towards
    the fastest, and predict too fast a run.
    """
    scale = np.maximum(np.abs(amounts).max(axis=0, initial=0.0), 1e-300)
    found, _ = nnls(amounts / scale, seconds)
    found = found / scale
    predicted = amounts @ found
    if predicted.sum() > 0:
        found *= seconds.sum() / predicted.sum()
    error = np.sqrt(np.square(amounts @ found - seconds).sum() / np.square(seconds).sum())
    return found, float(error)
