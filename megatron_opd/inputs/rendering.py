"""Says how a run renders its prompts, and what the user should know about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.schema import Config
from megatron_opd.config.sections import DataConfig
from megatron_opd.data.chats import USER, ChatMessage
from megatron_opd.data.marks import Marker
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
    data: DataConfig, models: CheckedModels, kept: RunTemplate | None
) -> tuple[CheckedModels, list[str]]:
    """Give the tokenizer the chat template of a run; return lines on what has changed since.

    kept: what the run has rendered with so far; None: it begins. Raises UserError.
    """
    fresh = RunTemplate() if kept is None else RunTemplate(kept.clock)
    tokenizer, lines = models.tokenizer, list[str]()
    if tokenizer is None or not data.chat_template:
        return replace(models, template=fresh), lines
    file = data.chat_template if isinstance(data.chat_template, Path) else None
    origin = str((file or models.student.path).resolve())
    now, problem = tokenizer.chat_template, None
    if file is not None:
        try:
            now = read_template(file)
        except ValueError as error:
            now, problem = None, str(error)
    found: Source = now
    if kept is not None and kept.origin == origin:
        found = kept.source
        if found != now:
            lines.append(
                f"data.chat_template: the chat template of {origin} has changed or is gone; the "
                "run goes on with the one that it began with"
            )
    elif problem is not None:
        raise UserError(problem)
    tokenizer.chat_template = found
    return replace(
        models, template=replace(fresh, origin=origin, source=found, own=file is not None)
    ), lines


def rendering_notes(config: Config, models: CheckedModels, every: Sequence[PromptSet]) -> list[str]:
    """Return what is unexpected about a tokenizer, its template, and the prompts made with them."""
    if models.tokenizer is None:
        return []
    if config.data.chat_template:
        found = template_notes(
            config.data.chat_template_kwargs, models.tokenizer, models.template.clock
        )
    else:
        found = frame_notes(models.tokenizer)
    return found + [line for each in every for line in each.tally.marked_lines]


def template_notes(
    kwargs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, clock: datetime
) -> list[str]:
    """Return what a chat template reads, does not read, or leaves to the tokenizer."""
    lines: list[str] = []
    unread = unread_kwargs(tokenizer, kwargs)
    if unread:
        lines.append(
            "data.chat_template_kwargs: the tokenizer's chat template does not read "
            f"{', '.join(unread)}, which has no effect"
        )
    named = sources(tokenizer)
    if len(named) > 1:
        tools = f"; {TOOLS} for rows with tools" if TOOLS in named else ""
        lines.append(
            f"data.chat_template: of the tokenizer's chat templates {', '.join(named)} the one "
            f"named {DEFAULT} is used{tools}"
        )
    if reads_clock(tokenizer):
        lines.append(
            "data.chat_template: the chat template reads the clock; for every prompt of the run, "
            f"after --resume too, it stands at {clock.isoformat(sep=' ')}"
        )
    begin = Marker(tokenizer).frame[0]
    bos = str(tokenizer.decode(begin, skip_special_tokens=False))
    if begin and not any("bos_token" in text or bos in text for text in named.values()):
        lines.append(
            f"data.chat_template: prompts begin without {bos}, which the tokenizer puts in front "
            "of texts and the chat template does not write"
        )
    return lines + _unopened(kwargs, tokenizer, clock)


def _unopened(
    kwargs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, clock: datetime
) -> list[str]:
    """Return a line if the template leaves it to the model to begin an answer."""
    eos: Any = tokenizer.eos_token
    try:
        asked = apply_template(
            tokenizer, (ChatMessage(USER, PROBES[0]),), kwargs, clock, answer=True
        )
    except Exception:  # noqa: BLE001  rendering says why
        return []
    if not eos or not asked.rstrip().endswith(eos):
        return []
    return [
        f"data.chat_template: prompts end with {eos}: the chat template begins no answer, which "
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
