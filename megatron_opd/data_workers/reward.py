"""Turns a judge into what the scorer asks for the reward of a rollout."""

from __future__ import annotations

from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.judge import Judge, reward_of_turns
from megatron_opd.data_workers.pool import WorkerPool
from megatron_opd.records.types import AnyRollout, HeldRollout
from megatron_opd.rollout.scorer import Reward


def make_reward(judge: Judge | None, ending: Ending, pool: WorkerPool | None = None) -> Reward:
    """Turn the judge into what the scorer asks for the reward of a rollout.

    An environment's own reward comes first; without a judge there is no other. ending: what ends
    the run's responses. pool: whose judges give the rewards of what data workers hold.
    """

    async def reward(rollout: AnyRollout) -> float | None:
        prompt = rollout.prompt
        if not isinstance(rollout, HeldRollout):
            ids, ends = rollout.last_turn_ids.tolist(), ending.beside(prompt.stop)
            return await reward_of_turns(judge, prompt, rollout.reward, ids, ends)
        if judge is None or rollout.reward is not None:
            return rollout.reward
        assert pool is not None, "a data worker holds the rollout"
        if prompt.answer is None or not judge.rewards(prompt):
            return None
        return await pool.judge(rollout, prompt.task, prompt.answer)

    return reward
