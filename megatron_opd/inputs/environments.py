"""Prepares environments: how what they say is encoded, what the template rewrites, who plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice

from megatron_opd.config.schema import Config
from megatron_opd.data.chats import USER, chat_of
from megatron_opd.data.prompts import PromptSet
from megatron_opd.environments.preflight import check_branch, note, rewrites
from megatron_opd.environments.settings import environment_host, player
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.models import CheckedModels, ending_of
from megatron_opd.inputs.rendering import rendering_of
from megatron_opd.rollout.trajectories import Playing

ROWS = 16
"""Conversations of each data file with which the chat template is tried."""


def turn_encoder(config: Config, models: CheckedModels) -> TurnEncoder | None:
    """Return what encodes an environment's words; None without environment. Raises UserError."""
    tokenizer = models.tokenizer
    if config.environment is None or tokenizer is None:
        return None
    rendering = rendering_of(config.data, models.template)
    return checked(lambda: TurnEncoder(tokenizer, rendering, ending_of(config, models).token_ids))


def environment_notes(
    config: Config, encoder: TurnEncoder | None, train: Sequence[PromptSet]
) -> list[str]:
    """Return what the chat template rewrites of earlier turns. Raises UserError.

    It is found before anything starts, on rows of the data: what is rewritten would be trained on
    as it was sampled, or becomes another sequence.
    """
    if encoder is None or config.environment is None:
        return []
    history = config.environment.history
    lines: list[str] = []
    for file in train:
        prompts = list(islice(file.examples, ROWS))
        chats = [
            chat_of(p.messages or [{"role": USER, "content": p.text}], p.tools) for p in prompts
        ]
        found = checked(lambda chats=chats: list(rewrites(encoder, chats)))
        if history == "branch":
            for chat in chats:
                checked(lambda chat=chat: check_branch(encoder, chat))
        said = note(found, len(chats), history)
        lines += [] if said is None else [f"{file.path}: {said}"]
    return lines


@asynccontextmanager
async def playing(config: Config, encoder: TurnEncoder | None) -> AsyncIterator[Playing | None]:
    """Keep what plays a run's trajectories, None without an environment. Raises UserError."""
    async with AsyncExitStack() as stack:
        found = None
        if config.environment is not None and encoder is not None:
            host = environment_host(config.environment)
            most = config.rollout.max_new_tokens
            try:
                await stack.enter_async_context(host)
                own = player(config.environment, encoder, most, tools=bool(host.tools))
            except ValueError as error:
                raise UserError(str(error)) from None
            found = Playing(host, own)
        yield found
