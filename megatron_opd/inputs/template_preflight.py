"""Finds where a teacher reads prompts otherwise than its own chat template writes them.

A teacher scores as it was trained only behind prompts as it was trained on. Its own template is
that of its checkpoint; what it reads are the prompts of the run (data/prompt_rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from megatron_opd.config.roles import Role, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.teacher_rules import otherwise_played
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.config.wording import shown
from megatron_opd.data.chats import ASSISTANT, ChatMessage
from megatron_opd.data.end_tokens import generation_config
from megatron_opd.data.faults import Unusable
from megatron_opd.data.outcomes import AskedPrompt
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.render import PROBES, Renderer, Rendering
from megatron_opd.data.template import Source
from megatron_opd.errors import UserError
from megatron_opd.inputs.models import CheckedModels
from megatron_opd.inputs.rendering import reading_of, rendering_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", ""))
"""What templates begin a thought with, and end one with."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of generation_config.json that change what a model samples."""
PIECE = 40
"""Characters shown of each side from the first difference on."""


@dataclass(frozen=True, slots=True)
class TemplateGap:
    """Says where what is read first differs from what a template writes.

    place: of the first differing token, from 1. read, written: the texts from there on. meaning: in
    words. where: the first such row. differing: how many do, of num_prompts.
    """

    place: int
    read: str
    written: str
    meaning: str
    where: str
    differing: int = 1
    num_prompts: int = 1

    def __str__(self) -> str:
        return (
            f"{self.differing} of {self.num_prompts} tried: {self.meaning}; first {self.where}, "
            f"token {self.place}: it reads {_piece(self.read)}, not {_piece(self.written)}"
        )


def template_gap(
    tokenizer: PreTrainedTokenizerBase, how: Rendering, asked: Sequence[AskedPrompt]
) -> TemplateGap | None:
    """Compare what is read with how a tokenizer and its template write the same prompts.

    None: alike, or the template takes none of them. ValueError: it does not work.
    """
    rendered = Renderer(tokenizer, how).render([each.prompt for each in asked])
    first: TemplateGap | None = None
    differing = compared = 0
    for each, written in zip(asked, rendered, strict=True):
        ids = getattr(written, "ids", None)
        if ids is None:  # the template does not take this prompt
            continue
        compared += 1
        read = each.ids_Q.tolist()
        if read == ids:
            continue
        differing += 1
        first = first or _gap(tokenizer, read, ids, each)
    return first and replace(first, differing=differing, num_prompts=compared)


def _gap(
    tokenizer: PreTrainedTokenizerBase, read: list[int], written: list[int], asked: AskedPrompt
) -> TemplateGap:
    pairs = zip_longest(read, written)
    same = next(place for place, (one, other) in enumerate(pairs) if one != other)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    rest, wanted = text(read[same:]), text(written[same:])
    last = asked.prompt if isinstance(asked.prompt, str) else asked.prompt[-1].content
    bos = tokenizer.bos_token_id
    if same == 0 and bos is not None and (read[:1] == [bos]) != (written[:1] == [bos]):
        has = "begins with" if written[:1] == [bos] else "does not begin with"
        meaning = f"its own {has} {tokenizer.bos_token}"
    elif last.strip() in text(read[:same]):
        meaning = _of_opening(*(text(ids).rpartition(last.strip())[2] for ids in (read, written)))
    else:
        meaning = _of_beginning(rest, wanted)
    return TemplateGap(same + 1, rest, wanted, meaning, asked.where)


def _of_opening(read: str, written: str) -> str:
    """Say how two texts behind the last message differ, which answers continue."""
    for begin, end in THOUGHTS:
        ours, theirs = begin in read, begin in written
        shut = [bool(end) and end in text for text in (read, written)]
        if theirs and not ours:
            what = f"shuts an empty {begin}" if shut[1] else f"opens {begin}"
            return f"its own {what} in front of an answer, what it reads does not"
        if ours and not theirs:
            what = f"shuts an empty {begin}" if shut[0] else f"opens {begin}"
            return f"what it reads {what} in front of an answer, its own does not"
        if ours and shut[0] != shut[1]:
            return f"its own {'shuts' if shut[1] else 'leaves open'} the {begin} of an answer"
    if not read:
        return "its own begins the answer, what it reads does not"
    if not written:
        return "what it reads begins the answer, its own does not"
    return "answers are begun otherwise"


def _of_beginning(read: str, written: str) -> str:
    """Say how two texts up to the last message differ."""
    ours, theirs = ("system" in text[:PIECE].lower() for text in (read, written))
    if theirs and not ours:
        return "its own writes a system message"
    if ours and not theirs:
        return "what it reads has a system message, its own writes none"
    return "messages are written otherwise"


def _piece(text: str) -> str:
    return shown(text if len(text) <= PIECE else f"{text[:PIECE]}...") if text else "the end"


def template_notes_of_teachers(
    config: Config, models: CheckedModels, train: Sequence[PromptSet]
) -> list[str]:
    """Compare what each teacher reads with its own template, on prompts of the data.

    Returns lines for what is not refused. UserError: a teacher reads another template than its own
    without being told to, with scoring.guard refuse.
    """
    guard = config.scoring.guard
    if guard == "off" or not config.estimator.asks_teacher:
        return []
    asked = [each for file in train for each in file.tally.asked]
    lines: list[str] = []
    for name, role in teacher_roles(config).items():
        own = [each for each in asked if name in each.teachers]
        if role not in models.teachers or not own:
            continue
        lines += _of_sampling(config, models, name)
        found = _of_teacher(config, models, name, own)
        if found is None:
            continue
        line, refused = found
        if refused and guard == "refuse":
            raise UserError(f"{line}; if that is intended, set scoring.guard to warn or off")
        lines.append(line)
    return lines


def _of_teacher(
    config: Config, models: CheckedModels, name: str, asked: Sequence[AskedPrompt]
) -> tuple[str, bool] | None:
    """Return what a teacher reads otherwise, and whether that is a fault; None: nothing."""
    section, role = config.all_teachers[name], key_of_teacher(name)
    tokenizer, how = models.teachers[role], reading_of(config, models, name)
    if not how.chat_template:
        if not section.own_reading:
            framed = template_gap(tokenizer, how, asked)
            if framed is not None:
                return (
                    f"{role}.model reads texts otherwise than its tokenizer makes ids of them: "
                    f"{framed}; to let it read its own: {role}.chat_template: false"
                ), True
        how = replace(how, system_prompt=None)
    source = models.written.get(role)
    if source is None:
        return None
    natural = with_source(tokenizer, source)
    try:
        gap = template_gap(natural, replace(how, chat_template=True), asked)
    except ValueError:
        return None  # it works for nobody
    told = section.chat_template is not None or otherwise_played(config) is not None
    if gap is None and config.scoring.alignment is not None:
        return None  # it reads its own end
    if gap is None:
        return _of_ends(config, models, role, natural)
    advice = "" if told else f"; to let it read its own: {role}.chat_template: true"
    which = "another chat template than its own" if how.chat_template else "no chat template"
    said = f"{role}.model reads prompts in {which}, {gap}{advice}"
    return said, how.chat_template and not told


def _of_ends(
    config: Config, models: CheckedModels, role: Role, natural: PreTrainedTokenizerBase
) -> tuple[str, bool] | None:
    """Compare what the student's and the teacher's own template write behind an answer."""
    student = models.tokenizer
    if student is None or not config.data.chat_template:
        return None
    how = rendering_of(config.data, models.template)
    ours, theirs = (closing(each, how) for each in (student, natural))
    if ours is None or theirs is None or ours == theirs:
        return None
    return (
        f"{role}.model's own chat template ends an answer with {_piece(theirs)}, the student's "
        f"with {_piece(ours)}: it scores an end that it was not trained to write"
    ), False


def _of_sampling(config: Config, models: CheckedModels, name: str) -> list[str]:
    """Compare how the two models' generation_config.json sample; ends are compared elsewhere."""
    role = key_of_teacher(name)
    ours, theirs = (
        {key: value for key, value in generation_config(path).items() if key in SAMPLING}
        for path in (models.student.path, models.models.every[role].path)
    )
    said = [
        f"{key} {shown(theirs.get(key))}, not {shown(ours.get(key))}"
        for key in SAMPLING
        if theirs.get(key) != ours.get(key)
    ]
    if not said:
        return []
    return [
        f"{role}.model's generation_config.json samples otherwise than the student's: "
        f"{', '.join(said)}; scores are of temperature {config.scoring.temperature:g}, whatever it "
        "says"
    ]


def closing(tokenizer: PreTrainedTokenizerBase, how: Rendering) -> str | None:
    """Return what a template writes behind an answer; None: it does not write the answer."""
    found = Renderer(tokenizer, how).answered(PROBES[0], ChatMessage(ASSISTANT, "It is 5."))
    return None if isinstance(found, Unusable) else found.behind.strip()


def with_source(tokenizer: PreTrainedTokenizerBase, source: Source) -> PreTrainedTokenizerBase:
    """Return the tokenizer with another chat template; the one that is given stays as it is."""
    other = copy(tokenizer)
    other.chat_template = source
    return other
