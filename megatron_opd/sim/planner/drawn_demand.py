"""Draws the samples that every candidate of a search is given, as a simulation does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.records.seeds import ROLLOUT, derived_seed
from megatron_opd.sim.costs import Lengths
from megatron_opd.sim.drawn_lengths import draws_of, limits_of
from megatron_opd.sim.planner.demand import Demand, Requests, Window
from megatron_opd.sim.trajectories import PlayedLength, turns_within


def demand_of(config: Config, lengths: Lengths, window: Window, ahead: int = 0) -> Demand:
    """Return what a simulation of `config` samples (sim/world.py draws the same).

    ahead: batches beyond the window's last update, which are admitted before its end.
    """
    draws, limits = draws_of(config, lengths), limits_of(config)
    seeds = [
        derived_seed(config.run.seed, ROLLOUT, uid)
        for uid in range((window.last + ahead) * config.buffer.batch_size)
    ]
    if limits is None:
        samples = [[PlayedLength(draws.prompt(s), draws.response(s)[0], None)] for s in seeds]
    else:
        samples = [turns_within(limits, draws.trajectory(seed))[0] for seed in seeds]
    if not all(samples):
        raise UserError(
            "environment.max_tokens must leave room for a turn behind the prompts of "
            f"simulation.lengths, got {config.environment and config.environment.max_tokens}"
        )
    requests = _requests_of(samples)
    return Demand(
        batch_size=config.buffer.batch_size,
        mini_batches=config.learner.num_mini_batches,
        window=window,
        prompt_N=requests.summed(requests.given_R),
        response_N=requests.summed(requests.sampled_R),
        requests=requests,
        plays=limits is not None,
    )


def _requests_of(samples: Sequence[Sequence[PlayedLength]]) -> Requests:
    """Return those of samples, each with a turn at least."""
    starts: list[int] = []
    for turns in samples:
        length = 0
        for turn in turns:
            starts.append(length + turn.given)
            length = starts[-1] + turn.sampled
    each = [turn for turns in samples for turn in turns]
    counts = [len(turns) for turns in samples]
    return Requests(
        first_N=np.cumsum([0, *counts[:-1]], dtype=np.int32),
        start_R=np.array(starts, np.int32),
        given_R=np.array([turn.given for turn in each], np.int32),
        sampled_R=np.array([turn.sampled for turn in each], np.int32),
        answer_s_R=np.array([turn.answer_s or 0.0 for turn in each], np.float64),
    )
