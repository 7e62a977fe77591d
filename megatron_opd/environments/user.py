"""Lets a model speak with the student as a user: the same conversation from the other side.

Invariant: the user reads the student's turns as messages to it, encoded without control tokens;
what it says is text to the student, and nothing of it is trained on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_opd.config.environment import UserConfig
from megatron_opd.config.wording import line
from megatron_opd.data.chats import (
    ASSISTANT,
    LEADING,
    SYSTEM,
    USER,
    Chat,
    ChatMessage,
    RowChat,
    chat_text,
)
from megatron_opd.environments.calls import CallReader, Reply
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.formats import PLAIN
from megatron_opd.environments.play import Played, Player, TurnSampler, opened_by
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.environments.replayed import turn_text
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.words import Answered
from megatron_opd.records.drops import (
    ENVIRONMENT_BAD_REPLY,
    ENVIRONMENT_TIMED_OUT,
    ENVIRONMENT_TOO_LONG,
)
from megatron_opd.records.seeds import USER as USER_SEED
from megatron_opd.records.seeds import derived_seed

_ROW_TEXTS = re.compile(r"\{(prompt|answer|stop)\}")


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """Holds the ids of what a user said, its end token included, and the server it came from."""

    ids: Sequence[int]
    url: str = ""


Voice = Callable[[Sequence[int], int, str], Awaitable[SpokenTurn]]
"""Samples what a user says behind ids, by a seed; on the server at an address, if it serves.

Raises EnvironmentFailed where no server answers."""


@dataclass(frozen=True, slots=True)
class UserPart:
    """Says how a user is played. encoder: of the model that plays it, with its own chat template.

    context: most tokens of a conversation and of what is said next. role: whose servers play it.
    """

    config: UserConfig
    encoder: TurnEncoder
    context: int
    role: str


def first_seen(config: UserConfig, row: EnvironmentRow) -> Chat:
    """Return what a user reads before it says anything. ValueError: the row has no answer."""
    if "{answer}" in config.instructions and row.answer is None:
        raise ValueError(
            "environment.instructions must not name {answer} with rows that have none; set "
            "data.answer_key, or leave it out"
        )
    answer = row.answer if isinstance(row.answer, str) else ", ".join(row.answer or ())
    texts = {"prompt": chat_text(row.prompt), "answer": answer, "stop": config.stop}
    told = _ROW_TEXTS.sub(lambda match: texts[match[1]], config.instructions)
    return ChatMessage(SYSTEM, told), ChatMessage(USER, config.greeting)


class SimulatedUser:
    """Speaks with the student in one trajectory; a Partner (guarded.py)."""

    def __init__(self, part: UserPart, voice: Voice) -> None:
        self._part, self._voice = part, voice
        self._reader = CallReader(PLAIN, ())
        self._seen: Chat = ()
        self._seed, self._url = 0, ""

    async def start(self, row: EnvironmentRow) -> Chat:
        """Return the row's prompt, or what the user makes of its instructions."""
        config, self._seed = self._part.config, row.seed
        asked = row.prompt
        chat = (ChatMessage(USER, asked),) if isinstance(asked, str) else asked
        try:
            self._seen = first_seen(config, row)
        except ValueError as error:
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, line(error)) from None
        if config.opens == "user":
            said = await self._say(0)
            if said is None:
                what = "the user ended the conversation before it began"
                raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, what)
            leading = (message for message in chat if message.role in LEADING)
            return RowChat.of((*leading, ChatMessage(USER, said)), ())
        if chat[-1].role == ASSISTANT:
            what = "the row's prompt must not end with an assistant's message"
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, what)
        self._seen = (*self._seen, ChatMessage(ASSISTANT, chat_text(asked)))
        return RowChat.of(chat, ())

    async def step(self, reply: Reply) -> Answered:
        """Return what the user says to a turn; the end where it says the stop word."""
        self._seen = (*self._seen, ChatMessage(USER, reply.text))
        if reply.turn + 1 == self._part.config.max_turns:  # nobody would read what it says
            return Answered((), None, ended=False)
        said = await self._say(reply.turn + 1)
        if said is None:
            return Answered((), None, ended=True)
        return Answered((ChatMessage(USER, said),), None, ended=False)

    async def _say(self, turn: int) -> str | None:
        """Return what the user says next, None for the end. EnvironmentFailed: it says nothing."""
        config, encoder = self._part.config, self._part.encoder
        try:
            ids = encoder.first(self._seen)
        except ValueError as error:
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, line(error)) from None
        if len(ids) + config.max_user_tokens > self._part.context:
            what = f"the user's conversation of {len(ids)} tokens leaves no room for a turn"
            raise EnvironmentFailed(ENVIRONMENT_TOO_LONG, what)
        seed = derived_seed(self._seed, USER_SEED, turn)
        try:
            async with asyncio.timeout(config.timeout_s):
                spoken = await self._voice(ids, seed, self._url)
        except TimeoutError:
            what = f"the user took over {config.timeout_s:g} s"
            raise EnvironmentFailed(ENVIRONMENT_TIMED_OUT, what) from None
        self._url = spoken.url
        text = turn_text(encoder, spoken.ids)
        said = self._reader.read(text, turn, opened_by(encoder, ids)).text.strip()
        if config.stop in said:
            return None
        if not said:
            what = f"the user said nothing in {len(spoken.ids)} tokens"
            raise EnvironmentFailed(ENVIRONMENT_BAD_REPLY, what)
        self._seen = (*self._seen, ChatMessage(ASSISTANT, said))
        return said


@dataclass(frozen=True, slots=True)
class UserPlaying:
    """Runs trajectories with users that a model plays; see Playing.

    part: how. voice: samples what they say. player: runs a trajectory with one.
    """

    part: UserPart
    voice: Voice
    player: Player

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory; see Playing."""
        return await self.player.play(SimulatedUser(self.part, self.voice), row, sample)


def check_user(part: UserPart, row: EnvironmentRow) -> None:
    """Check that the model's template takes a row's conversation as its user sees it.

    ValueError: it does not, or there is no room for it.
    """
    seen = first_seen(part.config, row)
    asked, told = ChatMessage(ASSISTANT, chat_text(row.prompt)), ChatMessage(USER, "Let me see.")
    longest = 0
    for chat in (seen, (*seen, asked, told), (*seen, asked, told, asked, told)):
        longest = max(longest, len(part.encoder.first(chat)))
    room = part.context - part.config.max_user_tokens
    if longest > room:
        raise ValueError(
            f"a user's conversation must fit {room} tokens, the context of its servers less "
            f"environment.max_user_tokens, and a short one has {longest}; shorten "
            "environment.instructions, or raise the teacher's context_length"
        )
