"""Prepares environments: how what they say is encoded, what the template rewrites, who plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import islice

from megatron_opd.config.environment import AgentConfig, EnvironmentConfig, UserConfig
from megatron_opd.config.roles import Role, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.data.chats import USER, chat_of
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.render import Rendering
from megatron_opd.environments.agent.endpoint import agent_endpoint
from megatron_opd.environments.agent.playing import AgentPlaying
from megatron_opd.environments.hosted import HostedPlaying
from megatron_opd.environments.playing import Playing
from megatron_opd.environments.preflight import check_branch, note, rewrites
from megatron_opd.environments.protocol import row_of
from megatron_opd.environments.settings import agent_host, agent_student, environment_host, player
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.user import UserPart, UserPlaying, check_user
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.models import RESERVED_TOKENS, CheckedModels, ending_of
from megatron_opd.inputs.rendering import readings_of, rendering_of
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.rollout.generator import TurnFleet
from megatron_opd.rollout.user_voice import TeacherVoice

ROWS = 16
"""Conversations of each data file with which the chat template is tried."""


def turn_encoder(config: Config, models: CheckedModels) -> TurnEncoder | None:
    """Return what encodes an environment's words; None without environment. Raises UserError."""
    tokenizer = models.tokenizer
    if config.environment is None or tokenizer is None:
        return None
    rendering = rendering_of(config.data, models.template)
    return checked(lambda: TurnEncoder(tokenizer, rendering, ending_of(config, models).token_ids))


def teacher_readers(config: Config, models: CheckedModels) -> dict[str, TeacherReader]:
    """Return what reads trajectories for the teachers with a rendering of their own, by name.

    Raises UserError.
    """
    found: dict[str, TeacherReader] = {}
    if config.environment is None or models.tokenizer is None:
        return found
    ends = ending_of(config, models).token_ids
    for name, own in readings_of(config, models).items():
        make = partial(TurnEncoder, own.tokenizer, own.rendering, ends)
        found[name] = TeacherReader(checked(make), config.data.system_prompt)
    return found


def user_part(config: Config, models: CheckedModels, train: Sequence[PromptSet]) -> UserPart | None:
    """Return how a teacher plays the user; None where none does, or its tokenizer is not here.

    Its chat template is tried on rows of the data. Raises UserError.
    """
    name, user = config.user_teacher, config.environment
    if name is None or not isinstance(user, UserConfig):
        return None
    role = key_of_teacher(name)
    facts, ends = models.models.teachers[role], models.ends.get(role)
    if ends is None:
        return None
    tokenizer = load_tokenizer(facts.path, f"{role}.model")
    if tokenizer.chat_template is None:
        raise UserError(
            f"{role}.model must have a chat template to play the user of environment.type user, "
            f"got {facts.path} without one; add a chat_template.jinja to it"
        )
    how = Rendering(chat_template=True, clock=models.template.clock, section=role)
    context = (section_of(config, role).context_length or facts.context_length) - RESERVED_TOKENS
    encoder = checked(lambda: TurnEncoder(tokenizer, how, ends.ids))
    part = UserPart(user, encoder, context, role)
    for file in train:
        for prompt in islice(file.examples, ROWS):
            try:
                check_user(part, row_of(prompt, 0))
            except ValueError as error:
                raise UserError(f"{role}.model: {error}") from None
    return part


def environment_notes(
    config: Config,
    encoder: TurnEncoder | None,
    train: Sequence[PromptSet],
    readers: Mapping[str, TeacherReader],
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
        for name, reader in readers.items():
            theirs = checked(lambda chats=chats, of=reader.encoder: list(rewrites(of, chats)))
            said = note(theirs, len(chats), history)
            lines += [] if said is None else [f"{key_of_teacher(name)}: {file.path}: {said}"]
    return lines


@asynccontextmanager
async def playing(
    config: Config,
    encoder: TurnEncoder | None,
    user: UserPart | None,
    fleets: Mapping[Role, TurnFleet],
) -> AsyncIterator[Playing | None]:
    """Keep what plays a run's trajectories, None without an environment. Raises UserError.

    fleets: the servers of all roles, of which a teacher's may play the user.
    """
    async with AsyncExitStack() as stack:
        found: Playing | None = None
        section = config.environment
        if section is not None and encoder is not None:
            try:
                if isinstance(section, AgentConfig):
                    found = await _agents(config, section, encoder, stack)
                elif user is not None:
                    found = _played(config, user, encoder, fleets)
                else:
                    found = await _hosted(config, section, encoder, stack)
            except ValueError as error:
                raise UserError(str(error)) from None
        yield found


async def _hosted(
    config: Config, section: EnvironmentConfig, encoder: TurnEncoder, stack: AsyncExitStack
) -> Playing:
    host = await stack.enter_async_context(environment_host(section))
    most = config.rollout.max_new_tokens
    return HostedPlaying(host, player(section, encoder, most, tools=bool(host.tools)))


def _played(
    config: Config, user: UserPart, encoder: TurnEncoder, fleets: Mapping[Role, TurnFleet]
) -> Playing:
    fleet = fleets[user.role]
    ends = sorted(user.encoder.end_ids)
    voice = TeacherVoice(user.config, config.scoring.attempts, fleet, ends)
    most = config.rollout.max_new_tokens
    return UserPlaying(user, voice, player(user.config, encoder, most, tools=False))


async def _agents(
    config: Config, section: AgentConfig, encoder: TurnEncoder, stack: AsyncExitStack
) -> Playing:
    try:
        host = await stack.enter_async_context(agent_host(section))
    except OSError as error:
        raise ValueError(
            f"environment.interpreter: {section.interpreter} cannot be started: {error.strerror}; "
            "name a Python"
        ) from None
    sampling = {"temperature": config.rollout.temperature, "top_p": config.rollout.top_p}
    endpoint = await stack.enter_async_context(agent_endpoint(section.message_bytes, sampling))
    student = agent_student(section, encoder, config.rollout.max_new_tokens)
    return AgentPlaying(host, endpoint, student, section.timeout_s)
