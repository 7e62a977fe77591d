"""Trajectories that a site plays arrive as they were played; what can be none is refused."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.runs import SampledRun
from megatron_opd.records.types import Prompt, Sample
from megatron_opd.rollout.scores import unscored
from megatron_opd.sim.clock import run_virtual
from megatron_opd.sites.checking import Forged, SampleRules, received_sample
from megatron_opd.sites.dispatcher import task_of
from megatron_opd.sites.messages import SiteTask, decode_to_site, encode
from megatron_opd.sites.sampling import prompt_of
from megatron_opd.transport.samples import encode_sample
from tests.support.fakes import make_prompt
from tests.support.hub_links import RULES, done_of
from tests.support.mixed_teachers import mixed_prompt
from tests.support.playing import SeededServers, everything, trajectories
from tests.support.trajectories import trajectory

LIMITS = TrajectoryLimits(4, 10_000, 6, 2)
PLAYS = replace(RULES, plays=LIMITS, vocab_size=400)


def scored(sample: Sample) -> Sample:
    """The sample with log-probs that can be, and without routing."""
    draws = sample.rollout.draws
    logp_N = np.full(draws.num_ids, -1.5, np.float32)
    weight_N = np.full(draws.num_ids, 0.25, np.float32)
    rollout = replace(
        sample.rollout,
        draws=replace(draws, sampler_logp_N=logp_N, weight_N=weight_N),
        experts_XLk=None,
        gates_XLk=None,
    )
    return Sample(rollout, logp_N - 1, rollout.reward)


PROMPT = make_prompt(0)
PLAYED = scored(unscored(run_virtual(trajectories(SeededServers()).generate(PROMPT))))
TURNS = PLAYED.rollout.turns


def received(sample: Sample = PLAYED, rules: SampleRules = PLAYS, **changes: Any) -> Sample:
    given = {"own_reward": 2.5, "reward": 2.5, "turns": TURNS, "finish_reason": "stop"}

    async def run() -> Sample:
        return received_sample(
            rules,
            PROMPT,
            done_of(0, **(given | changes)),
            encode_sample(sample),
            may_have=lambda version: version < 3,
            scores=True,
            site="a",
            delay_s=5.0,
        )

    return asyncio.run(run())


def test_a_trajectory_arrives_with_all_its_figures():
    found = received()
    assert found.rollout.prompt is PROMPT
    assert found.reward == found.rollout.reward == 2.5
    assert found.rollout.turns == TURNS
    assert len(found.rollout.runs) == 4
    assert everything(found)[0] == everything(PLAYED)[0], "ids, draws and versions"


def test_one_of_several_sequences_too():
    several = trajectory(4, [[(2, 3), (1, 2)], [(3, 1)]])
    found = received(scored(several), turns=TURNS[:3], own_reward=1.5, reward=1.5)
    assert len(found.rollout.sequences) == 2
    assert found.rollout.runs == several.rollout.runs


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"turns": TURNS[1:]}, "3 turns in runs of turns"),
        ({"finish_reason": "stop_string"}, "it ended by"),
        ({"own_reward": float("nan")}, "a reward of nan, its turns have 2.5"),
        ({"own_reward": 1.0}, "a reward of 1.0, its turns have 2.5"),
        ({"reward": 1.0}, "a reward of 1.0, not its environment's"),
        ({"turns": (msgspec.structs.replace(TURNS[0], cached=-1), *TURNS[1:])}, "figures"),
        ({"turns": (msgspec.structs.replace(TURNS[0], reward=np.inf), *TURNS[1:])}, "figures"),
        ({"turns": (msgspec.structs.replace(TURNS[0], waiting_s=np.nan), *TURNS[1:])}, "figures"),
        ({"turns": (msgspec.structs.replace(TURNS[0], call_errors=1), *TURNS[1:])}, "figures"),
        ({"rules": replace(PLAYS, plays=replace(LIMITS, max_turns=3))}, "4 turns"),
        ({"rules": replace(PLAYS, plays=replace(LIMITS, max_turn_tokens=1))}, "a turn of"),
        ({"rules": replace(PLAYS, plays=replace(LIMITS, max_tokens=20))}, "a sequence of"),
        ({"rules": replace(PLAYS, plays=replace(LIMITS, max_sampled_tokens=5))}, "sampled tokens"),
        ({"rules": replace(PLAYS, vocab_size=80)}, "outside the vocabulary"),
        ({"rules": replace(PLAYS, plays=None)}, "4 runs of sampled tokens, sites have 1"),
    ],
)
def test_what_is_no_trajectory_of_the_run_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(Forged, match=words):
        received(**changes)


def test_more_sequences_than_there_may_be_are_refused():
    several = scored(trajectory(4, [[(2, 3)], [(3, 1)], [(3, 1)]]))
    with pytest.raises(Forged, match="12 frames of a sample, which has 4 to 8"):
        received(several, turns=TURNS[:3])


def test_runs_of_turns_that_are_none_are_refused():
    runs = tuple(SampledRun(r.sequence, r.start, r.stop, 7) for r in PLAYED.rollout.runs)
    with pytest.raises(Forged, match="runs of turns"):
        received(replace(PLAYED, rollout=replace(PLAYED.rollout, runs=runs)))


def test_a_site_gets_what_an_environment_begins_with():
    messages = ({"role": "user", "content": "2+2=", "name": "a"},)
    more = {"messages": messages, "tools": ({"type": "function"},), "columns": {"level": 3}}
    prompt = replace(PROMPT, **more)
    task = decode_to_site(encode(task_of(prompt, plays=True)))
    assert isinstance(task, SiteTask)
    found = prompt_of(task)
    same = ("uid", "text", "answer", "row_id", "messages", "tools", "columns", "stop")
    for name in same:
        assert getattr(found, name) == getattr(prompt, name), name
    assert task_of(prompt) == task_of(PROMPT), "a completion needs none of it"
    assert isinstance(found, Prompt)


def test_a_task_tells_what_the_teacher_reads():
    own = np.array([3, 70_000], np.int32)
    task = decode_to_site(encode(task_of(replace(PROMPT, teacher_ids_Q=own))))
    assert isinstance(task, SiteTask)
    found = prompt_of(task).teacher_ids_Q
    assert found is not None
    assert found.tolist() == own.tolist()
    assert prompt_of(task_of(PROMPT)).teacher_ids_Q is None
    mixed = mixed_prompt(PROMPT)
    assert prompt_of(decode_to_site(encode(task_of(mixed)))).shares == mixed.mixture
    with pytest.raises(ValueError, match="a mixture of teachers that cannot be"):
        prompt_of(task_of(replace(mixed, mixture=(("math", 0.7), ("code", 0.3)))))
    assert task_of(replace(PROMPT, teacher_ids_Q=own), scores=False).teacher_ids is None


def test_a_site_samples_the_trajectory_that_the_run_would_have_played():
    async def run() -> Any:
        found = decode_to_site(encode(task_of(PROMPT, plays=True)))
        assert isinstance(found, SiteTask)
        return await trajectories(SeededServers()).generate(prompt_of(found))

    assert everything(scored(unscored(run_virtual(run())))) == everything(PLAYED)
