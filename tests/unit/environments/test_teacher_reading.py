"""A teacher reads what is given in its own rendering, and what was sampled as it was sampled."""

import asyncio
from itertools import product
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.chats import ASSISTANT, SYSTEM, Chat
from megatron_opd.data.render import Rendering
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.play import Played, Player, TurnSample
from megatron_opd.environments.protocol import EnvironmentRow, TrajectoryEnd
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.environments.turns import TurnEncoder
from tests.support.chat_families import BY_NAME, TEMPLATES, every_token

LIMITS = TrajectoryLimits(max_turns=6, max_tokens=10**6, max_turn_tokens=1000)
NAMED = ("qwen2.5", "llama3.1", "phi3", "qwen3")
"""Families whose template only appends: the others leave thoughts out, or write empty ones."""
TURNS = ("First it is 5.", "Then it is 17 <b>!", "And \U0001f642 at last.")


class Asking:
    """Asks further questions, a turn with several messages among them."""

    async def start(self, row: EnvironmentRow) -> Any:
        self._said = 0
        return [{"role": "user", "content": f"About {row.prompt}."}]

    async def step(self, reply: Any) -> Any:
        self._said += 1
        return TrajectoryEnd(1.0) if self._said == len(TURNS) else f"Further {self._said}?"


class Scripted:
    """Samples the turns, with the student's end behind each that is not cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: list[str]) -> None:
        self._texts = iter(text + end for text, end in zip(TURNS, ends, strict=True))
        self._tokenizer = tokenizer

    async def __call__(self, ids: Any, room: int, *, stop: Any = ()) -> TurnSample:
        return TurnSample(ids_of(self._tokenizer, next(self._texts)))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return encoded["input_ids"]


def with_template(name: str) -> PreTrainedTokenizerFast:
    tokenizer = every_token()
    tokenizer.bos_token = BY_NAME[name].bos
    tokenizer.chat_template = (TEMPLATES / BY_NAME[name].template).read_text(encoding="utf-8")
    return tokenizer


def encoder(name: str, of: str, system: str | None) -> TurnEncoder:
    """Of one family's template, for a student whose turns end as another family's do."""
    tokenizer = with_template(name)
    ends: Any = tokenizer.convert_tokens_to_ids(list(BY_NAME[of].ends))
    return TurnEncoder(tokenizer, Rendering(chat_template=True, system_prompt=system), ends)


def played(name: str, system: str | None, ends: list[str]) -> Played:
    own = encoder(name, name, system)

    async def run() -> list[Played]:
        partner = GuardedEnvironment(Asking(), EnvironmentLimits(300.0, 2**16))
        sample = Scripted(own.tokenizer, ends)  # type: ignore[arg-type]
        return [await Player(own, None, LIMITS).play(partner, EnvironmentRow("sums"), sample)]

    return asyncio.run(run())[0]


def row_of(found: Played, given: Any) -> list[int]:
    """What the teacher reads, the last turn included."""
    (ids_S,), row = found.trajectory.sequences, []
    for run, ids_G in zip(found.trajectory.runs, given, strict=True):
        row += [*ids_G.tolist(), *ids_S[run.start : run.stop].tolist()]
    return row


def wanted(name: str, chat: Chat, system: str | None, ends: list[str]) -> list[int]:
    """The conversation as transformers writes it, each turn with the end that was sampled."""
    tokenizer = with_template(name)
    messages = [{"role": m.role, "content": m.content} for m in chat if m.role != SYSTEM]
    messages = messages[: -1 if messages[-1]["role"] == ASSISTANT else None]
    if system is not None:
        messages = [{"role": SYSTEM, "content": system}, *messages]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for turn, end in zip(TURNS[:-1], ends, strict=False):
        before, after = text.split(turn)
        text = f"{before}{turn}{end}{after.removeprefix(end)}"
    return ids_of(tokenizer, f"{text}{TURNS[-1]}{ends[-1]}")


@pytest.mark.parametrize(("student", "teacher"), list(product(NAMED, NAMED)))
def test_a_teacher_reads_what_its_own_template_writes(student: str, teacher: str):
    ends = [BY_NAME[student].ends[0]] * len(TURNS)
    found = played(student, None, ends)
    reader = TeacherReader(encoder(teacher, student, None))
    assert row_of(found, reader.given(found)) == wanted(teacher, found.chat, None, ends)


@pytest.mark.parametrize("own", ["You know it: 17.", None])
def test_the_teacher_s_system_message_stands_for_the_student_s(own: str | None):
    ends = [BY_NAME["qwen2.5"].ends[0]] * len(TURNS)
    found = played("qwen2.5", "Be brief.", ends)
    assert found.chat[0].content == "Be brief."
    reader = TeacherReader(encoder("llama3.1", "qwen2.5", own), "Be brief.")
    assert row_of(found, reader.given(found)) == wanted("llama3.1", found.chat, own, ends)


def test_the_student_s_own_rendering_is_what_it_was_given():
    """Also behind a turn that ended without an end token."""
    ends = ["", BY_NAME["qwen3"].ends[0], ""]
    found = played("qwen3", None, ends)
    given = TeacherReader(encoder("qwen3", "qwen3", None)).given(found)
    assert row_of(found, given) == found.trajectory.sequences[0].tolist()
    assert len(given) == len(TURNS)
    other = TeacherReader(encoder("llama3.1", "qwen3", None)).given(found)
    assert row_of(found, other) != found.trajectory.sequences[0].tolist(), "the control"
