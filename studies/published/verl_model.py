"""Predicts an asynchronous run of verl from the colocated run of its size and one parameter set.

From the colocated row: how long responses are on average, so that sampling a step's responses on
all cards takes its `gen`; and how long a mini-batch takes. From verl's script for 64:64: sampling
engines and trainer ranks are 4 cards each (gen_tp, sp_size), and 0.8 of a card's memory is the
engine's. From the GPU's data sheet: what a decoded request and a cached token cost
(megatron_opd/sim/hardware.py). The rest is Parameters, the same for every row.

Engines, ranks and responses are simulated at a share of their number (`reduction`), so that each
engine and each rank has as much to do as in the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
)
from megatron_opd.sim.engine import Engine, EngineJob
from megatron_opd.sim.hardware import engine_cost
from megatron_opd.sim.learner import update_seconds
from megatron_opd.sim.lengths import LengthDraws
from megatron_opd.sim.world import simulate
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE
from studies.published.models import model_spec
from studies.published.verl_rows import (
    GROUP,
    MAX_RESPONSE,
    MINI_PROMPTS,
    PROMPTS,
    Case,
    Colocated,
    Row,
)

MODEL, GPU = "Qwen2.5-Math-7B", "h20"
CARDS_EACH = 4
"""Cards of a sampling engine, and of a trainer's data-parallel rank."""
MEMORY_SHARE = 0.8
PROMPT_TOKENS = 200
MAX_RUNNING = 1024
"""Responses that an engine decodes at once (verl's default of max_num_seqs)."""
SAMPLED_AT_ONCE = 256
"""Responses in flight for each engine: verl's rollouter admits 16 prompts of 16 responses."""
REDUCTION = 8
"""Of so many sampling engines one is simulated; of fewer, one in all."""
MINI_BATCHES = PROMPTS // MINI_PROMPTS
WARM_STEPS, STEPS = 1, 4
"""Steps (of PROMPTS prompts) that are not counted, and all that are simulated."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Holds what is the same for all rows.

    call_s: seconds of an update besides its mini-batches. share: time of a mini-batch on half of
    the cards, which do nothing else, over that on all cards, colocated. sync_s: of a weight sync.
    step_s: of a decode step, besides what its requests cost. cv: spread of the response lengths,
    standard deviation over mean.
    """

    call_s: float
    share: float
    sync_s: float
    step_s: float
    cv: float

    def update_s(self, case: Case) -> float:
        """Return the seconds of a step's updates."""
        return case.row.calls * self.call_s + self.mini_s(case)

    def mini_s(self, case: Case) -> float:
        """Return the seconds of a step's mini-batches; a colocated step is one call."""
        return self.share * (case.colocated.update_s - self.call_s)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Describes the sampling engines, the weight sync's seconds, and the lengths' spread."""

    step_s: float
    cv: float
    sync_s: float


@cache
def engine(step_s: float) -> EngineCost:
    """Return what an engine of CARDS_EACH H20 costs."""
    section = ServerConfig(
        model=Path("unused"),
        tp=CARDS_EACH,
        mem_fraction_static=MEMORY_SHARE,
        max_running_requests=MAX_RUNNING,
    )
    # what an engine's cards send each other is part of the step_s that is fitted
    without_links = replace(ASSUMED, link=math.inf, node_call_s=0.0)
    cost = engine_cost(model_spec(MODEL), section, CATALOGUE[GPU], without_links)
    return msgspec.structs.replace(cost, step_s=step_s)


def gen_seconds(cards: int, mean: float, cv: float, step_s: float) -> float:
    """Return how long all cards sample a step's responses, by the simulated engine."""
    lengths = LognormalLengths(mean=mean, cv=cv, prompt_tokens=PROMPT_TOKENS)
    draws = LengthDraws(lengths, MAX_RESPONSE, seed=0)
    engines = cards // CARDS_EACH
    each, last_s = PROMPTS * GROUP // engines, 0.0
    for first in range(0, each * engines, each):
        server = Engine(engine(step_s))
        for number in range(first, first + each):
            server.add(EngineJob(PROMPT_TOKENS, draws.response(number)[0]), 0.0)
        while server.next_s < math.inf:
            last_s = max(last_s, server.next_s)
            server.advance(server.next_s)
    return last_s


@cache
def mean_length(cards: int, gen_s: float, cv: float, step_s: float) -> float:
    """Return the mean length with which gen_seconds is the colocated run's gen, within 0.5 %."""
    low, high = 50.0, float(MAX_RESPONSE)
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        seconds = gen_seconds(cards, middle, cv, step_s)
        if abs(seconds / gen_s - 1) < 0.005:
            return middle
        low, high = (middle, high) if seconds < gen_s else (low, middle)
    return low


def reduction(row: Row) -> tuple[int, int]:
    """Return how many sampling engines (and ranks) are simulated, and of how many one is."""
    engines = row.cards // 2 // CARDS_EACH
    simulated = max(1, engines // REDUCTION)
    return simulated, engines // simulated


def settings_of(row: Row) -> Config:
    """Return the project's configuration of a row, at its reduced size."""
    engines, share = reduction(row)
    kind = {"type": "partial", "max_staleness": row.staleness}
    if not row.staleness:
        kind = {"type": "stream"}
    tree = {
        "run": {"max_steps": row.calls * STEPS},
        "data": {"train": "unused"},
        "student": {"model": "unused", "servers": engines},
        "teacher": {"model": "unused"},
        "buffer": {"batch_size": row.require_batches * MINI_PROMPTS * GROUP // share},
        "learner": {"num_mini_batches": row.require_batches},
        "schedule": {**kind, "sync_every": row.calls, "order": "completion"},
        "rollout": {
            "max_new_tokens": MAX_RESPONSE,
            "group_size": GROUP,
            "concurrency": SAMPLED_AT_ONCE * engines,
        },
        "scoring": {"concurrency": SAMPLED_AT_ONCE * engines},
    }
    return Config.model_validate(tree)


@cache
def step_seconds(
    row: Row, cards: int, gen_s: float, sampling: Sampling, call_s: float, mini_s: float
) -> float:
    """Simulate a row; return the seconds of a step.

    Of `row` only the allocation and the mode are read (`plain`). cards, gen_s: of the colocated
    run. call_s: of an update besides its mini-batches. mini_s: of all mini-batches of a step.
    """
    mean = mean_length(cards, gen_s, sampling.cv, sampling.step_s)
    lengths = LognormalLengths(mean=mean, cv=sampling.cv, prompt_tokens=PROMPT_TOKENS)
    ranks, share = reduction(row)
    busiest = _busiest_tokens(lengths, PROMPTS * GROUP // share, ranks)
    costs = Costs(
        engine=engine(sampling.step_s),
        teachers={"teacher": ScoreCost()},  # the reward is a rule
        learner=LearnerCost(update_s=call_s, token_s=mini_s / busiest, ranks=ranks),
        sync=SyncCost(sync_s=sampling.sync_s, paused_s=sampling.sync_s),
    )
    updates = simulate(settings_of(row), costs, lengths).totals.throughput.updates
    first_s, last_s = updates[row.calls * WARM_STEPS - 1][1], updates[-1][1]
    return (last_s - first_s) / (STEPS - WARM_STEPS)


@cache
def _busiest_tokens(lengths: LognormalLengths, count: int, ranks: int) -> float:
    """Return the tokens of a step's mini-batches on the busiest rank of each, added up."""
    draws = LengthDraws(lengths, MAX_RESPONSE, seed=1)
    tokens = [lengths.prompt_tokens + draws.response(i)[0] for i in range(count)]
    return update_seconds(tokens, LearnerCost(token_s=1.0, ranks=ranks), MINI_BATCHES)


def plain(row: Row) -> Row:
    """Return the row without any of its times: what a prediction may read of it."""
    return Row("", "", row.cards, row.staleness, row.require_batches, 0.0, 0.0, 0.0, ())


def predict(case: Case, parameters: Parameters) -> float:
    """Predict the seconds of a step."""
    return step_seconds(
        plain(case.row),
        case.colocated.cards,
        case.colocated.gen_s,
        Sampling(parameters.step_s, parameters.cv, parameters.sync_s),
        parameters.call_s,
        parameters.mini_s(case),
    )


def mean_length_of(colocated: Colocated, parameters: Parameters) -> float:
    """Return the mean response length that explains a colocated run's gen, in tokens."""
    return mean_length(colocated.cards, colocated.gen_s, parameters.cv, parameters.step_s)
