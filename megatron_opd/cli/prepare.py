"""Everything a run needs that can be checked and loaded before a process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.preflight import ModelFacts, check_models, prompt_limit
from megatron_opd.cli.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.data.prompts import PromptSet, PromptSource, load_prompts
from megatron_opd.data.tasks import get_task, get_verifier
from megatron_opd.evaluation import Judge
from megatron_opd.teacher.guard import PROMPTS
from megatron_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Checked input of a run.

    heldout: evaluation problems, empty when there is no evaluation. judge: None when the task has
    no verifier. probes: training prompts by teacher, to look at its scores before the run.
    """

    student: ModelFacts
    prompts: PromptSource
    prompts_too_long: int
    heldout: tuple[Prompt, ...]
    judge: Judge | None
    probes: Mapping[str, tuple[Prompt, ...]]


def checked(load: Callable[[], ResultT]) -> ResultT:
    """Call `load`; a ValueError about the user's files becomes a UserError."""
    try:
        return load()
    except ValueError as error:
        raise UserError(str(error)) from None


def end_tokens(student: ModelFacts, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a response: the tokenizer's and those of the model's config."""
    named = student.raw.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def prepare(config: Config, cursor: int = 0) -> Prepared:
    """Check models and load data; prompts start at `cursor`. Raises UserError."""
    student, tokenizer = check_models(config)
    limit = prompt_limit(config, student)
    data = config.data

    teachers = tuple(teacher_roles(config))

    def load(path: Path, *, need_answers: bool) -> PromptSet:
        return load_prompts(
            path,
            tokenizer,
            max_tokens=limit,
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            chat_template=data.chat_template,
            need_answers=need_answers,
            # held-out problems are the student's own
            teacher_key=None if need_answers else data.teacher_key,
            teachers=teachers,
        )

    task = checked(lambda: get_task(data.task))
    train = checked(lambda: load(data.train, need_answers=False))
    wanted = config.evaluation.problems if config.evaluation.runs else 0
    heldout: tuple[Prompt, ...] = ()
    if wanted:
        path = data.heldout
        if path is None:
            raise UserError(f"data.heldout must be a file when evaluation.problems is {wanted}")
        checked(lambda: get_verifier(data.task))
        heldout = checked(lambda: load(path, need_answers=True)).prompts[:wanted]
    judge = None
    if task.verify is not None:
        judge = Judge(
            task.verify,
            decode=lambda ids: str(tokenizer.decode(list(ids))),
            end_token_ids=end_tokens(student, tokenizer),
        )
    return Prepared(
        student=student,
        prompts=PromptSource(
            train.prompts,
            seed=config.run.seed,
            shuffle=data.shuffle,
            group_size=config.rollout.group_size,
            cursor=cursor,
        ),
        prompts_too_long=train.too_long,
        heldout=heldout,
        judge=judge,
        probes={name: probes_of(train.prompts, name) for name in teachers},
    )


def probes_of(prompts: Iterable[Prompt], teacher: str) -> tuple[Prompt, ...]:
    """The first prompts that `teacher` is to score, again if they are few; any if it has none."""
    every = tuple(prompts)
    own = [prompt for prompt in every if prompt.teacher == teacher]
    return tuple(islice(cycle(own or every), PROMPTS))
