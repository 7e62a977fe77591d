"""Judges sampled token ids: takes the text of the answer from a response and asks the verifier.

Invariant: a reward is in [0, 1]; a verifier that fails is VerifierFailed, never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.tasks import get_task
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.records.types import Prompt


@dataclass(frozen=True, slots=True)
class Judge:
    """Gives rewards to responses as they were sampled.

    verifiers: to be entered before the judge is asked. task: names that of rows that name none.
    """

    verifiers: TaskVerifiers
    task: str
    text: ResponseText

    async def reward(
        self, prompt: Prompt, response_ids: Sequence[int], ending: Ending
    ) -> float | None:
        """Return the reward in [0, 1] of a response to `prompt`.

        ending: what its request said ends it. None without an answer, or where the prompt's task
        has no verifier. A response that nothing ended is judged as it stands. Raises
        VerifierFailed.
        """
        if prompt.answer is None or not self.rewards(prompt):
            return None
        task = prompt.task or self.task
        text = self.text.answer(response_ids, ending)
        return await self.verifiers.verify(task, text, prompt.answer)

    def rewards(self, prompt: Prompt) -> bool:
        """Return whether responses to `prompt` get a reward."""
        task = prompt.task or self.task
        return prompt.answer is not None and get_task(task).verify is not None


async def reward_of_turns(
    judge: Judge | None,
    prompt: Prompt,
    own: float | None,
    last_ids: Sequence[int],
    ending: Ending,
) -> float | None:
    """Return the reward of a trajectory: its environment's own one, else of its last turn.

    own: None where the environment gave none. last_ids: of the last turn. Without an environment
    that is the only one. ending: what its request said ends it. None: neither gives a reward.
    Raises VerifierFailed.
    """
    if own is not None or judge is None:
        return own
    return await judge.reward(prompt, last_ids, ending)
