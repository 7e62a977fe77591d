"""Defines the checked input of a run, which prepare.py makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_opd.config.roles import Role
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.curriculum import CurriculumSource
from megatron_opd.data.end_tokens import Ending, EndTokens
from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.data.judge import Judge
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.response_text import Encode
from megatron_opd.data.stream import PromptSource
from megatron_opd.data.template import RunTemplate
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.user import UserPart
from megatron_opd.inputs.kept_data import Shape
from megatron_opd.inputs.model_facts import ModelFacts
from megatron_opd.inputs.other_tokenizer import OtherTokenizer
from megatron_opd.metrics.token_texts import Decode
from megatron_opd.records.types import Prompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds the checked input of a run.

    vocab_sizes: ids of every role's model; a teacher may have more than the student. heldout:
    evaluation problems by set, empty when there is no evaluation. judge: None when the task has no
    verifier. decode: turns token ids into text. encode: cuts text into the student's ids. hints:
    makes prompts of teachers with the hints of other rows. probes: training prompts by teacher, to
    look at its scores before the run. ends: the ids that end a response of every role's model.
    ending: what ends a response of the run, besides its row's own strings. turns: encodes what an
    environment says; None without one. readers: of teachers that read that otherwise, by name.
    first: training prompts, the first ones. user: how a teacher plays the user; None where none
    does. other: of a teacher with a tokenizer of its own. template: what chats are rendered with.
    train: the files that prompts are drawn from. notes: for the terminal. shape: of the training
    files. state: what the controller continues from.
    """

    student: ModelFacts
    vocab_sizes: Mapping[Role, int]
    prompts: PromptSource | CurriculumSource
    train: tuple[PromptSet, ...]
    heldout: Mapping[str, tuple[Prompt, ...]]
    judge: Judge | None
    decode: Decode
    encode: Encode
    hints: HintSwap
    probes: Mapping[str, tuple[Prompt, ...]]
    ends: Mapping[Role, EndTokens]
    ending: Ending
    shape: Shape
    turns: TurnEncoder | None = None
    user: UserPart | None = None
    readers: Mapping[str, TeacherReader] = field(default_factory=dict[str, TeacherReader])
    other: OtherTokenizer | None = None
    first: tuple[Prompt, ...] = ()
    template: RunTemplate = field(default_factory=RunTemplate)
    notes: tuple[str, ...] = ()
    state: ControllerState = NOTHING_YET

    @property
    def prompts_skipped(self) -> dict[str, int]:
        """Returns how many rows of the training files cannot be used, by cause, of those judged."""
        return dict(sum((Counter(each.tally.skipped) for each in self.train), Counter[str]()))
