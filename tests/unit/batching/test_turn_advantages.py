"""Advantages of turns, from the rewards of an environment to the gradients of a loss."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_opd.batching.shares import shares
from megatron_opd.batching.turn_advantages import turn_advantages
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.layout import PackLayout
from megatron_opd.learner.micro_batch import distil_micros
from megatron_opd.losses.objective import evaluate
from megatron_opd.records.types import Batch, Sample, TurnFigures
from megatron_opd.transport.frames import from_frames, to_frames
from tests.support.trajectories import layouts, trajectory

GROUP = 3
OBJECTIVES = (
    {"type": "reinforce"},
    {"type": "ppo", "advantage": "leave_one_out"},
    {"type": "grpo"},
    {"type": "grpo", "advantage": "group_mean", "kl": {"to": "sampler", "coefficient": 0.1}},
    {"type": "gspo", "trust": {"type": "clip", "low": 0.5, "high": 0.5}},
    {"type": "gepo", "advantage": "group_std_population"},
)
Rewards = list[float | None]


def by_turn(**objective: object) -> Estimator:
    tree = {"support": {"type": "path"}, "objective": objective, "credit": "turn"}
    return Estimator.model_validate(tree)


def played(uid: int, layout: list, rewards: Rewards) -> Sample:
    """A trajectory whose turns have these rewards."""
    made = trajectory(uid, layout)
    turns = tuple(TurnFigures(1.0, 0.0, reward=reward) for reward in rewards)
    return replace(made, rollout=replace(made.rollout, turns=turns))


def gradients(samples: list[Sample], est: Estimator, ranks: int) -> list[np.ndarray]:
    """Of the loss by each sampled token's log-prob, through the wire: float64 [T] by sample."""
    config = {"parallel": {"dp": ranks}, "max_tokens_per_microbatch": 16, "dtype": "float32"}
    batch = Batch(0, 2, tuple(samples))
    found: dict[int, np.ndarray] = {}
    for share in shares(batch, LearnerConfig.model_validate(config), est, GROUP):
        frames = [memoryview(bytes(frame)) for frame in to_frames(share)]
        columns = from_frames(0, 2, share.plan, frames)
        micros = distil_micros(columns, 0, PackLayout(torch.device("cpu")))
        for sequences, micro in zip(share.plan[0], micros, strict=True):
            if not sequences:
                continue
            draws = micro.loss_input.draws
            noise_N = torch.sin(draws.sampler_logp_N.double() * 1e3) / 4
            student_N = (draws.sampler_logp_N.double() + noise_N).requires_grad_()
            loss = evaluate(est, draws.scored(student_N)).loss_sum
            (gradient_N,) = torch.autograd.grad(loss, student_N, materialize_grads=True)
            path_T = gradient_N[draws.path_T].numpy()
            lengths = [int(columns.response_B[b]) for b in sequences]
            for b, part in zip(sequences, np.split(path_T, np.cumsum(lengths)[:-1]), strict=True):
                each = share.sequences[b]
                found[1000 * each.sample.rollout.prompt.uid + each.sequence] = part
    return [
        np.concatenate([found[1000 * uid + number] for number in range(len(s.rollout.sequences))])
        for uid, s in enumerate(samples)
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(layouts, min_size=6, max_size=6), st.sampled_from(OBJECTIVES), st.data())
def test_a_reward_changes_no_gradient_of_another_position(made, objective, data):
    """Neither earlier nor later, in its own trajectory nor in another one of the group."""
    est = by_turn(**objective)
    some = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
    rewards = [
        data.draw(st.lists(some, min_size=turns, max_size=turns))
        for turns in (sum(map(len, layout)) for layout in made)
    ]
    samples = [played(uid, *each) for uid, each in enumerate(zip(made, rewards, strict=True))]
    before = gradients(samples, est, 2)
    uid = data.draw(st.integers(0, len(made) - 1))
    turn = data.draw(st.integers(0, len(rewards[uid]) - 1))
    changed = [*rewards[uid]]
    changed[turn] = 7.0
    samples[uid] = played(uid, made[uid], changed)
    after = gradients(samples, est, 2)
    for other, (old_T, new_T) in enumerate(zip(before, after, strict=True)):
        turn_T = np.concatenate(
            [np.full(run.num_tokens, run.turn) for run in samples[other].rollout.runs]
        )
        may = (turn_T == turn) & (other // GROUP == uid // GROUP)
        np.testing.assert_array_equal(old_T[~may], new_T[~may])


@settings(deadline=None, max_examples=8)
@given(st.lists(layouts, min_size=6, max_size=6))
def test_a_reward_acts_on_the_tokens_of_its_turn(made):
    samples = [
        played(uid, layout, [1.0] * sum(map(len, layout))) for uid, layout in enumerate(made)
    ]
    assume(all(len(sample.rollout.turns) > 1 for sample in samples[:GROUP]))
    est = by_turn(type="grpo", trust={"type": "none"})
    assert not any(gradient_T.any() for gradient_T in gradients(samples, est, 1))
    samples[0] = played(0, made[0], [1.0, 3.0] + [1.0] * (len(samples[0].rollout.turns) - 2))
    for sample, gradient_T in zip(samples, gradients(samples, est, 1), strict=True):
        turn_T = np.concatenate([np.full(r.num_tokens, r.turn) for r in sample.rollout.runs])
        acts_T = turn_T == 1 if sample.rollout.prompt.uid < GROUP else np.zeros(len(turn_T), bool)
        assert (gradient_T != 0).tolist() == acts_T.tolist()


def test_turns_are_compared_with_those_at_their_position_by_hand():
    rewards = [[1.0, 0.0, None], [3.0, None], [2.0, 4.0], [9.0]]
    shapes = [[[(2, 1), (1, 2)], [(3, 1)]], [[(2, 2), (1, 1)]], [[(2, 1), (1, 1)]], [[(2, 3)]]]
    samples = [played(uid, *each) for uid, each in enumerate(zip(shapes, rewards, strict=True))]
    samples[3] = replace(samples[3], masked=True)  # in its group's statistics
    found = turn_advantages(by_turn(type="grpo", advantage="group_mean"), samples, 2)
    assert found is not None
    assert [part.tolist() for part in found] == [[-1.0, 0.0], [0.0], [1.0, 0.0], [-3.5, 0.0], [3.5]]
    own = turn_advantages(by_turn(type="reinforce"), samples, 2)
    assert own is not None
    assert [part.tolist() for part in own] == [[1.0, 0.0], [0.0], [3.0, 0.0], [2.0, 4.0], [9.0]]
    pair = turn_advantages(by_turn(type="grpo"), samples, 4)
    assert pair is not None
    first = [1.0, 3.0, 2.0, 9.0]
    scale = statistics.stdev(first) + 1e-6
    assert pair[0][0] == pytest.approx((1.0 - statistics.mean(first)) / scale, rel=1e-12)
    assert pair[0][1] == pytest.approx(-(2**-0.5), rel=1e-5), "0 and 4: the second one has none"


def test_without_rewards_and_with_credit_of_trajectories_there_is_none():
    samples = [played(uid, [[(2, 1), (1, 2)]], [None, None]) for uid in range(2)]
    found = turn_advantages(by_turn(type="grpo"), samples, 2)
    assert found is not None
    assert [part.tolist() for part in found] == [[0.0, 0.0]] * 2
    whole = Estimator.model_validate({"support": {"type": "path"}, "objective": {"type": "grpo"}})
    assert turn_advantages(whole, samples, 2) is None
