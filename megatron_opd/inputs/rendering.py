"""Says how a run renders its prompts, and what the user should know about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import DataConfig
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.data.chats import USER, ChatMessage
from megatron_opd.data.marks import Marker
from megatron_opd.data.prompt_rules import TeacherReading
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.render import PROBES, Rendering, unread_kwargs
from megatron_opd.data.spoken import apply_template
from megatron_opd.data.template import (
    DEFAULT,
    TOOLS,
    RunTemplate,
    Source,
    read_template,
    reads_clock,
    sources,
)
from megatron_opd.errors import UserError
from megatron_opd.inputs.models import CheckedModels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDS = 8
"""Ids shown of each end of a prompt."""
HEAD, TAIL = 300, 120
"""Characters shown of each end of a prompt."""


def rendering_of(data: DataConfig, template: RunTemplate) -> Rendering:
    """Return how the prompts of a configuration become text."""
    return Rendering(
        bool(data.chat_template), data.system_prompt, data.chat_template_kwargs, template.clock
    )


def template_of_run(run_dir: Path) -> RunTemplate | None:
    """Return what the run in a directory renders with, None without one. Raises UserError."""
    file = RunDir(run_dir).template
    try:
        return RunTemplate.from_json(json.loads(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: {error}") from None


def with_template(
    config: Config, models: CheckedModels, kept: RunTemplate | None
) -> tuple[CheckedModels, list[str]]:
    """Give the tokenizers the chat templates of a run; return lines on what has changed since.

    kept: what the run has rendered with so far; None: it begins. Raises UserError.
    """
    template = RunTemplate() if kept is None else RunTemplate(kept.clock)
    tokenizer, lines, named = models.tokenizer, list[str](), config.data.chat_template
    if tokenizer is not None and named:
        before = None if kept is None else (kept.origin, kept.source)
        own = _Origin("data.chat_template", named, models.student.path)
        origin, source = own.template(tokenizer, before, lines)
        own_file = isinstance(named, Path)
        template = replace(template, origin=origin, source=source, own=own_file)
        tokenizer.chat_template = source
    teachers: dict[str, tuple[str, Source]] = {}
    written: dict[str, Source] = {}
    sections = {key_of_teacher(name): each for name, each in config.all_teachers.items()}
    for role, theirs in models.teachers.items():
        written[role] = theirs.chat_template
        section = sections[role]
        if not section.own_reading:
            continue
        if section.chat_template is None:
            theirs.chat_template = template.source
        elif section.chat_template:
            before = None if kept is None else kept.teachers.get(role)
            path = models.models.teachers[role].path
            own = _Origin(f"{role}.chat_template", section.chat_template, path)
            teachers[role] = own.template(theirs, before, lines)
            theirs.chat_template = teachers[role][1]
    template = replace(template, teachers=teachers)
    return replace(models, written=written, template=template), lines


@dataclass(frozen=True, slots=True)
class _Origin:
    """Says which key names a chat template, what it says, and which model has one besides."""

    key: str
    named: bool | Path
    model: Path

    def template(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kept: tuple[str | None, Source] | None,
        lines: list[str],
    ) -> tuple[str, Source]:
        """Return where it came from, and its text as the run has had it so far. UserError."""
        file = self.named if isinstance(self.named, Path) else None
        origin = str((file or self.model).resolve())
        now, problem = tokenizer.chat_template, None
        if file is not None:
            try:
                now = read_template(file, self.key)
            except ValueError as error:
                now, problem = None, str(error)
        if kept is None or kept[0] != origin:
            if problem is not None:
                raise UserError(problem)
            return origin, now
        if kept[1] != now:
            lines.append(
                f"{self.key}: the chat template of {origin} has changed or is gone; the run goes "
                "on with the one that it began with"
            )
        return origin, kept[1]


def readings_of(config: Config, models: CheckedModels) -> dict[str, TeacherReading]:
    """Return how teachers turn prompts into ids that do so in their own way, by their names.

    That is those with a reading of their own, and one with a tokenizer of its own.
    """
    found: dict[str, TeacherReading] = {}
    aligned = config.scoring.alignment is not None
    for name, role in teacher_roles(config).items():
        own = aligned or config.all_teachers[name].own_reading
        if not own or role not in models.teachers:
            continue
        vocab_size, how = models.models.teachers[role].vocab_size, reading_of(config, models, name)
        found[name] = TeacherReading(models.teachers[role], how, vocab_size)
    return found


def reading_of(config: Config, models: CheckedModels, name: str) -> Rendering:
    """Return how the prompts of a teacher become text; where it says nothing, as the student's."""
    data, section = config.data, config.all_teachers[name]
    template, kwargs = section.chat_template, section.chat_template_kwargs
    return Rendering(
        bool(data.chat_template if template is None else template),
        data.system_prompt if section.system_prompt is None else section.system_prompt,
        data.chat_template_kwargs if kwargs is None else kwargs,
        models.template.clock,
        key_of_teacher(name),
    )


def rendering_notes(config: Config, models: CheckedModels, every: Sequence[PromptSet]) -> list[str]:
    """Return what is unexpected about a tokenizer, its template, and the prompts made with them."""
    if models.tokenizer is None:
        return []
    if config.data.chat_template:
        found = template_notes(rendering_of(config.data, models.template), models.tokenizer)
    else:
        found = frame_notes(models.tokenizer)
    for each in readings_of(config, models).values():
        if each.rendering.chat_template:
            found += template_notes(each.rendering, each.tokenizer)
    return found + [line for each in every for line in each.tally.marked_lines]


def template_notes(how: Rendering, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what a chat template reads, does not read, or leaves to the tokenizer."""
    lines: list[str] = []
    unread = unread_kwargs(tokenizer, how.template_kwargs)
    if unread:
        lines.append(
            f"{how.key}_kwargs: the tokenizer's chat template does not read "
            f"{', '.join(unread)}, which has no effect"
        )
    named = sources(tokenizer)
    if len(named) > 1:
        tools = f"; {TOOLS} for rows with tools" if TOOLS in named else ""
        lines.append(
            f"{how.key}: of the tokenizer's chat templates {', '.join(named)} the one "
            f"named {DEFAULT} is used{tools}"
        )
    if reads_clock(tokenizer):
        lines.append(
            f"{how.key}: the chat template reads the clock; for every prompt of the run, after "
            f"--resume too, it stands at {how.clock.isoformat(sep=' ')}"
        )
    begin = Marker(tokenizer).frame[0]
    bos = str(tokenizer.decode(begin, skip_special_tokens=False))
    if begin and not any("bos_token" in text or bos in text for text in named.values()):
        lines.append(
            f"{how.key}: prompts begin without {bos}, which the tokenizer puts in front "
            "of texts and the chat template does not write"
        )
    return lines + _unopened(how, tokenizer)


def _unopened(how: Rendering, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line if the template leaves it to the model to begin an answer."""
    eos: Any = tokenizer.eos_token
    try:
        chat = (ChatMessage(USER, PROBES[0]),)
        asked = apply_template(tokenizer, chat, how.template_kwargs, how.clock, answer=True)
    except Exception:  # noqa: BLE001  rendering says why
        return []
    if not eos or not asked.rstrip().endswith(eos):
        return []
    return [
        f"{how.key}: prompts end with {eos}: the chat template begins no answer, which "
        "then begins as the model likes; most write the assistant's role if add_generation_prompt"
    ]


def frame_notes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line if the tokenizer ends texts, which a prompt must not be."""
    end = Marker(tokenizer).frame[1]
    if not end:
        return []
    eos = str(tokenizer.decode(end, skip_special_tokens=False))
    return [
        f"student.model: its tokenizer puts {eos} behind a text; prompts, which responses "
        "continue, are read without it"
    ]


def first_prompt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return a bounded view of a prompt: its text, ids, their number, and its special tokens."""
    text = str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]} [...] {text[-TAIL:]}"
    head = ", ".join(map(str, ids[:ENDS]))
    tail = ", ".join(map(str, ids[max(ENDS, len(ids) - ENDS) :]))
    gap = ", ..., " if len(ids) > 2 * ENDS else ", " if tail else ""
    names = Marker(tokenizer).names
    special = Counter(i for i in ids if i in names)
    listed = ", ".join(f"{n} x {names[i]} ({i})" for i, n in list(special.items())[:ENDS])
    more = f" and {len(special) - ENDS} more" if len(special) > ENDS else ""
    return f"{text!r}; {len(ids)} ids: {head}{gap}{tail}; special tokens: {listed or 'none'}{more}"
