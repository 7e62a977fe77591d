"""Checks and loads everything that a run needs before a process is started.

One function reads it for `opd run` and for `opd check`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_opd.config.mixture_rules import may_mix
from megatron_opd.config.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.controller.snapshot import NOTHING_YET, ControllerState
from megatron_opd.data.files import is_source
from megatron_opd.data.judge import Judge
from megatron_opd.data.prompt_rules import ONE_TEACHER, PromptRules
from megatron_opd.data.prompts import WHOLE_BYTES, PromptFile, PromptSet
from megatron_opd.data.records import Columns
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.shards import is_there
from megatron_opd.data.tasks import get_task, get_verifier
from megatron_opd.data.template import RunTemplate
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.environments.teacher_reading import TeacherReader
from megatron_opd.environments.turns import TurnEncoder
from megatron_opd.environments.user import UserPart
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.disk_space import disk_notes
from megatron_opd.inputs.environments import (
    environment_notes,
    teacher_readers,
    turn_encoder,
    user_part,
)
from megatron_opd.inputs.hints import make_swap, swap_notes
from megatron_opd.inputs.kept_data import Begun, Shape
from megatron_opd.inputs.model_facts import trust_note
from megatron_opd.inputs.models import (
    CheckedModels,
    check_models,
    ending_of,
    prompt_limit,
    teacher_prompt_limit,
)
from megatron_opd.inputs.notes import notes, sampler_gaps
from megatron_opd.inputs.other_tokenizer import (
    TEACHER,
    OtherTokenizer,
    alignment_notes,
    other_tokenizer,
)
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.prompts import (
    by_row,
    check_enough,
    chosen_source,
    drawn_notes,
    going_on,
    key_of_set,
    lasting,
    seen_problems,
    skipped_lines,
    unhinted_notes,
    unseen_keys,
)
from megatron_opd.inputs.quantised import quantised_note
from megatron_opd.inputs.rendering import (
    readings_of,
    rendering_notes,
    rendering_of,
    with_template,
)
from megatron_opd.inputs.same_tokenizer import end_notes
from megatron_opd.inputs.sinks import check_sinks
from megatron_opd.inputs.template_preflight import template_notes_of_teachers
from megatron_opd.inputs.tokenizers import make_decode, make_encode
from megatron_opd.inputs.verifiers import check_isolation, row_tasks
from megatron_opd.inputs.weights import unread_note
from megatron_opd.models.hf_config import rope_note
from megatron_opd.models.rope import yarn_note
from megatron_opd.records.mixtures import shares_of
from megatron_opd.records.types import Prompt
from megatron_opd.rollout.first_scores import RESPONSES
from megatron_opd.rollout.teacher_guard import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds what a run reads, checked.

    train: of every file, in order; empty where one is not here (`opd check` of a plan). heldout: by
    name, without those that are not here or not needed. judge: None when the task has no verifier
    or the tokenizer is not here. absent: what was not here to be checked. notes: what the user
    should know. shape: of the training files, None where not all of them was read. state: what the
    controller continues from. turns: encodes what an environment says; None without one. user: how
    a teacher plays the user; None where none does. readers: of teachers that read trajectories
    otherwise than the student, by name. other: of a teacher with a tokenizer of its own; None: it
    has the student's.
    """

    checked: CheckedModels
    train: tuple[PromptSet, ...]
    heldout: Mapping[str, PromptSet]
    judge: Judge | None
    absent: tuple[str, ...]
    notes: tuple[str, ...]
    shape: Shape | None = None
    state: ControllerState = NOTHING_YET
    turns: TurnEncoder | None = None
    user: UserPart | None = None
    readers: Mapping[str, TeacherReader] = field(default_factory=dict[str, TeacherReader])
    other: OtherTokenizer | None = None


def read_inputs(
    config: Config,
    *,
    kept: RunTemplate | None = None,
    begun: Begun | None = None,
    plan: bool = False,
    first_rows: int | None = None,
    data: bool = True,
    judge_all: bool = False,
) -> Inputs:
    """Check the models and read the data as a run will. Raises UserError.

    kept: what the run has rendered chats with so far; begun: what it goes on from; None: it begins.
    plan: where a model's weights are not on this machine, check as far as its files go, and let a
    data file be elsewhere too, unless `data` asks for it. first_rows: rows of each data file to
    read; None: all. judge_all: judge those now, too, that are read when they are drawn.
    """
    checked(lambda: check_sinks(config))
    checked(lambda: get_task(config.data.task))
    wanted = config.evaluation.problems if config.evaluation.runs else 0
    if wanted and not config.data.heldout:
        raise UserError(f"data.heldout must be a file when evaluation.problems is {wanted}")
    if wanted and config.environment is None:  # which may give rewards
        checked(lambda: get_verifier(config.data.task))
    check_isolation(config)
    models, changed = with_template(config, check_models(config, plan=plan), kept)
    gaps = sampler_gaps(config, models.student.spec)
    absent = list(models.absent)
    elsewhere = bool(models.absent) and not data
    gone = [file.path for file in config.data.train if elsewhere and not _is_here(file.path)]
    heldout: dict[str, PromptSet] = {}
    for name, each in config.data.heldout.items() if wanted else ():
        key = key_of_set(config, name)
        if elsewhere and not _is_here(each.file):
            absent.append(f"data.{key} {each.file}: not here")
        else:
            heldout[name] = read_heldout(config, name, models, first_rows, judge_all=judge_all)
    watched = frozenset(prompt.text for each in heldout.values() for prompt in each.examples)
    train = ()
    if not gone:
        how = HowRead(first_rows, by_row(begun), judge_all, watched)
        train = read_train(config, models, how)
    shape, state, changed_data = going_on(config, train, begun)
    if train:
        check_enough(config, train, shape)
    missing = (*absent, *(f"data.train {path}: not here" for path in gone))
    judge = None if models.tokenizer is None else make_judge(config, models.tokenizer)
    turns, readers = turn_encoder(config, models), teacher_readers(config, models)
    user = user_part(config, models, train)
    other = other_of(config, models)
    every = (*train, *heldout.values())
    said = (
        *notes(config),
        *gaps,
        *disk_notes(config, models.student.spec),
        *model_notes(models),
        *models.notes,
        *tokenizer_notes(config, models, other),
        *changed,
        *rendering_notes(config, models, every),
        *template_notes_of_teachers(config, models, train),
        *environment_notes(config, turns, train, readers),
        *drawn_notes(train),
        *(unseen_keys(config, train) if train else ()),
        *unhinted_notes(config, train),
        *swap_notes(config, models.tokenizer, train),
        *skipped_lines(every),
        *changed_data,
        *lasting(config, train, shape),
        *(
            line
            for name, each in heldout.items()
            for line in seen_problems(train, key_of_set(config, name), each.path, each.examples)
        ),
    )
    return Inputs(
        models, train, heldout, judge, missing, said, shape, state, turns, user, readers, other
    )


def other_of(config: Config, models: CheckedModels) -> OtherTokenizer | None:
    """Return how the tokens of student and teacher become each other's; None: they need not.

    None too where a tokenizer is not here (`opd check` of a plan). UserError: they cannot.
    """
    alignment, ours, theirs = config.scoring.alignment, models.tokenizer, models.teachers
    if alignment is None or ours is None or TEACHER not in theirs:
        return None
    return other_tokenizer(alignment, ours, theirs[TEACHER], models.ends)


def tokenizer_notes(
    config: Config, models: CheckedModels, other: OtherTokenizer | None
) -> list[str]:
    """Return what a user should know about the tokenizers of student and teachers."""
    alignment = config.scoring.alignment
    if models.tokenizer is None or alignment is not None:
        return [] if other is None or alignment is None else alignment_notes(alignment, other)
    return end_notes(models.ends, models.tokenizer, config.scoring.guard)


def model_notes(models: CheckedModels) -> list[str]:
    """Return what a user may not expect of each model's rotary settings and unread tensors."""
    found = [
        line
        for role, model in models.models.served.items()
        for line in (
            rope_note(f"{role}.model", model.raw),
            trust_note(f"{role}.model", model),
            quantised_note(role, model.path),
        )
    ]
    student = models.student
    found += [
        unread_note(student.path, "student.model", student.spec),
        yarn_note("student.model", student.spec.rope),
    ]
    return [line for line in found if line is not None]


def _is_here(path: Path) -> bool:
    return is_there(path) or is_source(path)


@dataclass(frozen=True, slots=True)
class HowRead:
    """Says how training data is read.

    first_rows: of each file; None: all. by_row: each row when it is drawn; None: if they are large.
    judge_all: judge all rows at once even then. watched: texts to look for.
    """

    first_rows: int | None = None
    by_row: bool | None = None
    judge_all: bool = False
    watched: Collection[str] = ()


def read_train(
    config: Config, models: CheckedModels, how: HowRead | None = None
) -> tuple[PromptSet, ...]:
    """Load every file of data.train, in order. Raises UserError."""
    how, rules = how or HowRead(), prompt_rules(config, models, heldout=False)
    files = [opened(TRAIN, file.path, rules, how.watched) for file in config.data.train]
    large = sum(file.rows.num_bytes for file in files) > WHOLE_BYTES
    if large if how.by_row is None else how.by_row:
        drawn = (
            partial(file.drawable, models.tokenizer, judge_all=how.judge_all) for file in files
        )
        return tuple(checked(each) for each in drawn)
    loaded = (partial(file.loaded, models.tokenizer, how.first_rows) for file in files)
    return tuple(checked(each) for each in loaded)


def read_heldout(
    config: Config,
    name: str,
    models: CheckedModels,
    first_rows: int | None,
    *,
    judge_all: bool,
) -> PromptSet:
    """Load a set of data.heldout, of a large file only the problems needed. Raises UserError.

    judge_all: judge all rows even then.
    """
    path, rules = config.data.heldout[name].file, prompt_rules(config, models, heldout=True)
    file = opened(key_of_set(config, name), path, rules)
    large = file.rows.num_bytes > WHOLE_BYTES
    if large and judge_all:
        return checked(partial(file.drawable, models.tokenizer, judge_all=True))
    enough = config.heldout[name].problems if large else None
    return checked(partial(file.loaded, models.tokenizer, first_rows, enough))


def opened(key: str, path: Path, rules: PromptRules, watched: Collection[str] = ()) -> PromptFile:
    """Open a file of the key below `data`. Raises UserError."""
    if not _is_here(path):
        raise UserError(f"data.{key}: data file not found: {path}")
    return checked(partial(PromptFile.open, path, rules, watched))


def prompt_rules(config: Config, models: CheckedModels, *, heldout: bool) -> PromptRules:
    """Return what a row of the training file, or of the held-out file, must be."""
    data, student = config.data, models.student
    # held-out problems are the student's own
    teacher_key = None if heldout else data.teacher_key
    teachers = {} if teacher_key is None else {teacher_key: tuple(teacher_roles(config))}
    mixture = config.scoring.mixture
    limit_key = None if heldout else data.max_new_tokens_key  # an evaluation has its own limit
    # what learns from rewards would drop every sample of a row without one
    needed = (heldout or config.estimator.reads_reward) and config.environment is None
    # a teacher of another tokenizer is evaluated on its own ids of them
    reads = not heldout or config.scoring.alignment is not None
    return PromptRules(
        Columns(
            chats=(data.prompt_key,),
            teacher_prompt=None if heldout else data.teacher_prompt_key,
            tools=data.tools_key if data.chat_template else None,
            answers=(data.answer_key,),
            needed=needed,
            teachers=teachers,
            mixes=may_mix(config),
            limits={} if limit_key is None else {limit_key: config.rollout.max_new_tokens},
            stops=() if data.stop_key is None else (data.stop_key,),
            names=(data.id_key,),
            tasks={} if data.task_key is None else {data.task_key: row_tasks(config, needed)},
            passed_on=() if config.environment is None else config.environment.columns,
            # so are all of their answers
            reward_weight=None if heldout else data.reward_weight_key,
            teacher_weight=None if heldout else data.teacher_weight_key,
        ),
        max_tokens=prompt_limit(config, student),
        max_teacher_tokens=teacher_prompt_limit(config, models.models),
        hinted=data.without_teacher_prompt == "skip" and not heldout,
        teacher_key=teacher_key,
        rendering=rendering_of(data, models.template),
        continues=data.continue_assistant,
        max_bad_fraction=data.max_bad_fraction,
        vocab_size=student.vocab_size,
        keeps_chats=config.environment is not None,
        readings=readings_of(config, models) if reads else {},
        shares=shares_of(mixture) if mixture else ONE_TEACHER,
    )


def make_judge(config: Config, tokenizer: PreTrainedTokenizerBase) -> Judge | None:
    """Make the judge of token ids; None without a verifier.

    Its verifiers are to be entered before it is asked.
    """
    task, by_row = config.data.task, config.data.task_key is not None
    if not by_row and get_task(task).verify is None:
        return None
    added = tokenizer.added_tokens_decoder.items()
    special = {i: str(token) for i, token in added if token.special}
    return Judge(make_verifiers(config), task, ResponseText(make_decode(tokenizer), special))


def make_verifiers(config: Config) -> TaskVerifiers:
    """Make the verifiers that rows may name, or that of data.task; to be entered once."""
    by_row = config.data.task_key is not None
    tasks = row_tasks(config, needed=True).values() if by_row else (config.data.task,)
    return TaskVerifiers(tasks, config.verifier)


def prepare(
    config: Config, begun: Begun | None = None, kept: RunTemplate | None = None
) -> Prepared:
    """Check models and load data. Raises UserError.

    begun: what the run goes on from; kept: what it has rendered chats with so far; None: it begins.
    """
    inputs = read_inputs(config, kept=kept, begun=begun)
    train = inputs.train
    every = [prompt for each in train for prompt in each.examples]
    settings = config.heldout
    tokenizer = inputs.checked.tokenizer
    if tokenizer is None or inputs.shape is None:
        raise ValueError("a run reads the tokenizer and all of data.train")
    return Prepared(
        student=inputs.checked.student,
        vocab_sizes={role: facts.vocab_size for role, facts in inputs.checked.models.every.items()},
        prompts=checked(lambda: chosen_source(config, train, inputs.state, inputs.shape)),
        train=train,
        heldout={
            name: found.examples[: settings[name].problems]
            for name, found in inputs.heldout.items()
        },
        judge=inputs.judge,
        decode=make_decode(tokenizer),
        encode=make_encode(tokenizer),
        hints=make_swap(tokenizer),
        probes={name: probes_of(every, name) for name in teacher_roles(config)},
        ends=inputs.checked.ends,
        ending=ending_of(config, inputs.checked),
        turns=inputs.turns,
        readers=inputs.readers,
        user=inputs.user,
        other=inputs.other,
        first=tuple(every[:RESPONSES]),
        template=inputs.checked.template,
        notes=inputs.notes,
        shape=inputs.shape,
        state=inputs.state,
    )


def probes_of(prompts: Iterable[Prompt], teacher: str) -> tuple[Prompt, ...]:
    """Return the first prompts that `teacher` scores, repeated if few; any if it has none.

    They are as it reads them.
    """
    every = tuple(prompts)
    own = [
        prompt
        if prompt.teacher_ids_Q is None
        else replace(prompt, token_ids_P=prompt.teacher_ids_Q, teacher_ids_Q=None)
        for prompt in every
        if teacher in dict(prompt.shares)
    ]
    return tuple(islice(cycle(own or every), PROMPTS))
