"""Judges sampled token ids: cuts a response at its end token and asks the verifier.

Invariant: a reward is in [0, 1]; a verifier that fails is VerifierFailed, never a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron_opd.data.tasks import get_task
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.types import Prompt

Decoder = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Gives rewards to responses as they were sampled.

    verifiers: to be entered before the judge is asked. task: names that of rows that name none.
    end_token_ids: those that end a response; what follows the first one is ignored.
    """

    verifiers: TaskVerifiers
    task: str
    decode: Decoder
    end_token_ids: Collection[int]

    async def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
        """Return the reward in [0, 1] of a response to `prompt`.

        None without an answer, or where the prompt's task has no verifier.

        A response without an end token is judged as it stands. Raises VerifierFailed.
        """
        if prompt.answer is None or not self.rewards(prompt):
            return None
        task = prompt.task or self.task
        text = self.decode(response_ids[: self.end(response_ids)])
        return await self.verifiers.verify(task, text, prompt.answer)

    def rewards(self, prompt: Prompt) -> bool:
        """Return whether responses to `prompt` get a reward."""
        task = prompt.task or self.task
        return prompt.answer is not None and get_task(task).verify is not None

    def end(self, response_ids: Sequence[int]) -> int | None:
        """Return the index of the first end token, None without one."""
        return next(
            (i for i, token in enumerate(response_ids) if token in self.end_token_ids), None
        )
