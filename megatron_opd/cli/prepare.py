"""Checks and loads everything that a run needs before a process is started.

One function reads it for `opd run` and for `opd check`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_opd.cli.disk_tables import disk_notes
from megatron_opd.cli.errors import UserError
from megatron_opd.cli.notes import notes, sampler_gaps
from megatron_opd.cli.preflight import CheckedModels, ModelFacts, check_models, prompt_limit
from megatron_opd.cli.roles import Role, teacher_roles
from megatron_opd.cli.tokenizer_files import end_tokens
from megatron_opd.config.schema import Config
from megatron_opd.data.prompts import PromptRules, PromptSet, PromptSource, load_prompts
from megatron_opd.data.records import Columns, is_source
from megatron_opd.data.tasks import Verifier, get_task, get_verifier
from megatron_opd.evaluation import Judge
from megatron_opd.metrics.token_texts import Decode
from megatron_opd.teacher.guard import PROMPTS
from megatron_opd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds what a run reads, checked.

    train, heldout: None where the file is not here (`opd check` of a plan) or not needed. judge:
    None when the task has no verifier or the tokenizer is not here. absent: what was not here to be
    checked. notes: what the user should know.
    """

    checked: CheckedModels
    train: PromptSet | None
    heldout: PromptSet | None
    judge: Judge | None
    absent: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Holds the checked input of a run.

    vocab_sizes: ids of every role's model; a teacher may have more than the student.
    heldout: evaluation problems, empty when there is no evaluation. judge: None when the task has
    no verifier. decode: turns token ids into text. probes: training prompts by teacher, to look at
    its scores before the run. prompts_skipped: rows of the training file that cannot be used, by
    cause. notes: for the terminal.
    """

    student: ModelFacts
    vocab_sizes: Mapping[Role, int]
    prompts: PromptSource
    prompts_skipped: dict[str, int]
    heldout: tuple[Prompt, ...]
    judge: Judge | None
    decode: Decode
    probes: Mapping[str, tuple[Prompt, ...]]
    notes: tuple[str, ...] = ()


def checked(load: Callable[[], ResultT]) -> ResultT:
    """Call `load`; a ValueError about the user's files becomes a UserError."""
    try:
        return load()
    except ValueError as error:
        raise UserError(str(error)) from None


def read_inputs(
    config: Config, *, plan: bool = False, first_rows: int | None = None, data: bool = True
) -> Inputs:
    """Check the models and read the data as a run will. Raises UserError.

    plan: where a model's weights are not on this machine, check as far as its files go, and let a
    data file be elsewhere too, unless `data` asks for it. first_rows: rows of each data file to
    read; None: all.
    """
    task = checked(lambda: get_task(config.data.task))
    wanted = config.evaluation.problems if config.evaluation.runs else 0
    if wanted and config.data.heldout is None:
        raise UserError(f"data.heldout must be a file when evaluation.problems is {wanted}")
    if wanted:
        checked(lambda: get_verifier(config.data.task))
    models = check_models(config, plan=plan)
    gaps = sampler_gaps(config, models.student.spec)
    absent = list(models.absent)
    found: dict[str, PromptSet] = {}
    for key, path in (("train", config.data.train), ("heldout", config.data.heldout)):
        if path is None or (key == "heldout" and not wanted):
            continue
        if models.absent and not data and not path.exists():
            absent.append(f"data.{key} {path}: not here")
            continue
        found[key] = read_prompts(config, key, path, models, first_rows)
        if key == "train":
            check_step_off(config, found[key])
    judge = None
    if models.tokenizer is not None:
        ends = end_tokens(
            "student.model", models.student.raw, models.student.vocab_size, models.tokenizer
        )
        judge = make_judge(task.verify, models.tokenizer, ends)
    skipped = [line for each in found.values() if (line := each.skipped_line) is not None]
    said = (
        *notes(config),
        *gaps,
        *disk_notes(config, models.student.spec),
        *skipped,
        *seen_problems(found.get("train"), found.get("heldout")),
    )
    return Inputs(models, found.get("train"), found.get("heldout"), judge, tuple(absent), said)


def read_prompts(
    config: Config, key: str, path: Path, models: CheckedModels, first_rows: int | None = None
) -> PromptSet:
    """Load data.train or data.heldout, as `key` says. Raises UserError."""
    if not path.is_file() and not is_source(path):
        raise UserError(f"data.{key}: data file not found: {path}")
    rules = prompt_rules(config, models.student, heldout=key == "heldout")
    return checked(partial(load_prompts, path, models.tokenizer, rules, first_rows=first_rows))


def check_step_off(config: Config, train: PromptSet) -> None:
    """Check that a fixed distance fits into the data. UserError: a prompt would meet itself."""
    schedule = config.schedule
    if schedule.type not in ("step_off", "controlled") or not train.whole:
        return
    permits = schedule.permits(config.buffer.batch_size)
    there = len(train.prompts) * config.rollout.group_size
    if permits > there:
        raise UserError(
            f"schedule.max_staleness {schedule.max_staleness:g} with type {schedule.type} keeps "
            f"{permits} responses in flight, but data.train has prompts for {there}; lower it, or "
            "buffer.batch_size"
        )


def seen_problems(train: PromptSet | None, heldout: PromptSet | None) -> list[str]:
    """Return a line if held-out problems are trained on: their accuracy then says little."""
    if train is None or heldout is None:
        return []
    trained = {prompt.text for prompt in train.prompts}
    both = sum(prompt.text in trained for prompt in heldout.prompts)
    if both == 0:
        return []
    return [
        f"{both} of {len(heldout.prompts)} prompts of data.heldout {heldout.path} are in "
        f"data.train {train.path} too: their accuracy is that of problems trained on"
    ]


def prompt_rules(config: Config, student: ModelFacts, *, heldout: bool) -> PromptRules:
    """Return what a row of the training file, or of the held-out file, must be."""
    data = config.data
    # held-out problems are the student's own
    teacher_key = None if heldout else data.teacher_key
    choices = {} if teacher_key is None else {teacher_key: tuple(teacher_roles(config))}
    return PromptRules(
        Columns(
            texts=(data.prompt_key,),
            answers=(data.answer_key,),
            # what learns from rewards would drop every sample of a row without one
            needed=heldout or config.estimator.reads_reward,
            choices=choices,
        ),
        max_tokens=prompt_limit(config, student),
        teacher_key=teacher_key,
        chat_template=data.chat_template,
        max_bad_fraction=data.max_bad_fraction,
        vocab_size=student.vocab_size,
    )


def make_judge(
    verify: Verifier | None, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> Judge | None:
    """Make the judge that applies `verify` to token ids. ends: ids that end a response."""
    if verify is None:
        return None
    return Judge(verify, decode=lambda ids: str(tokenizer.decode(list(ids))), end_token_ids=ends)


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Make what turns token ids into text as they stand, special tokens included."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return decode
    # ten times faster than the wrapper for a token at a time
    return lambda ids: backend.decode(list(ids), skip_special_tokens=False)


def prepare(config: Config, cursor: int = 0) -> Prepared:
    """Check models and load data; prompts start at `cursor`. Raises UserError."""
    inputs = read_inputs(config)
    train = inputs.train
    tokenizer = inputs.checked.tokenizer
    assert train is not None, "a run reads its training file"
    assert tokenizer is not None, "a run has the student's tokenizer"
    heldout = () if inputs.heldout is None else inputs.heldout.prompts
    return Prepared(
        student=inputs.checked.student,
        vocab_sizes={role: facts.vocab_size for role, facts in inputs.checked.models.items()},
        prompts=PromptSource(
            train.prompts,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            group_size=config.rollout.group_size,
            cursor=cursor,
        ),
        prompts_skipped=train.skipped,
        heldout=heldout[: config.evaluation.problems],
        judge=inputs.judge,
        decode=make_decode(tokenizer),
        probes={name: probes_of(train.prompts, name) for name in teacher_roles(config)},
        notes=inputs.notes,
    )


def probes_of(prompts: Iterable[Prompt], teacher: str) -> tuple[Prompt, ...]:
    """Return the first prompts that `teacher` scores, repeated if few; any if it has none."""
    every = tuple(prompts)
    own = [prompt for prompt in every if prompt.teacher == teacher]
    return tuple(islice(cycle(own or every), PROMPTS))
