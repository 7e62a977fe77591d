"""Samples what a simulated user says, on the servers of the teacher that plays it.

The stop word is looked for in the text of a whole turn (environments/user.py): a teacher's servers
have no tokenizer, and end a turn at its end token alone.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Collection, Sequence

import numpy as np

from megatron_opd.config.environment import UserConfig
from megatron_opd.config.wording import line
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.user import SpokenTurn
from megatron_opd.rollout.generator import TurnFleet
from megatron_opd.rollout.scorer import teacher_reason
from sglang_bridge.errors import BridgeError
from sglang_bridge.protocol import RolloutReply, RolloutRequest
from sglang_bridge.retry import Backoff, retried


class TeacherVoice:
    """Asks a teacher's servers for a user's turns; see Voice.

    Args:
        user: how they are sampled.
        attempts: tries of one turn, over all servers.
        fleet: the servers; what they score meanwhile is batched with it.
        end_ids: the ids that end a turn.
    """

    def __init__(
        self, user: UserConfig, attempts: int, fleet: TurnFleet, end_ids: Collection[int]
    ) -> None:
        self._user, self._fleet = user, fleet
        self._end_ids, self._backoff = tuple(end_ids), Backoff(attempts)
        self._run_id, self._numbers = uuid.uuid4().hex[:8], itertools.count()

    async def __call__(self, ids: Sequence[int], seed: int, prefer: str) -> SpokenTurn:
        """Return what a user says; see Voice."""
        input_ids = np.asarray(ids, np.int32)

        async def once(earlier: int) -> RolloutReply:
            request = RolloutRequest(
                rid=f"{self._run_id}-user-{next(self._numbers)}.",
                input_ids=input_ids,
                max_new_tokens=self._user.max_user_tokens,
                temperature=self._user.temperature,
                stop_token_ids=self._end_ids,
                seed=seed,
            )
            return await self._fleet.generate(request, prefer=prefer)

        try:
            reply = await retried(once, self._backoff)
        except BridgeError as error:
            raise EnvironmentFailed(teacher_reason(error), line(error)) from error
        return SpokenTurn(reply.output_ids_T.tolist(), reply.url)
