"""Checks the models of a run before anything is started.

A run that passes them fails later only for causes outside its input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_opd.config.roles import STUDENT, Role, answering, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.tree import key_of_teacher
from megatron_opd.config.wording import shown
from megatron_opd.data.end_tokens import Ending, EndTokens, read_end_tokens
from megatron_opd.data.template import RunTemplate, Source
from megatron_opd.environments.trajectory import trajectory_limits
from megatron_opd.errors import UserError
from megatron_opd.inputs.megatron_settings import check_megatron
from megatron_opd.inputs.model_facts import (
    ModelFacts,
    RunModels,
    ServedFacts,
    check_window,
    read_model,
    read_teacher,
)
from megatron_opd.inputs.same_tokenizer import check_tokenizer, further_tokens
from megatron_opd.inputs.served_rules import MEASURED
from megatron_opd.inputs.tokenizers import default_end, has_tokenizer, load_tokenizer
from megatron_opd.inputs.weights import check_weights, has_weights, served_tensors
from megatron_opd.models.families.table import FAMILIES
from megatron_opd.models.shared_ids import num_shared_ids
from megatron_opd.sizing import learner as planning_learner
from megatron_opd.sizing import servers as planning_servers
from sglang_bridge.protocol import MAX_ATOMS, ServerInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# SGLang takes inputs of fewer than context - 6 tokens (Scheduler: max_req_input_len), and the
# teacher is sent prompt and response as one input.
RESERVED_TOKENS = 7


@dataclass(frozen=True, slots=True)
class CheckedModels:
    """Holds every role's model, the student's first, and the tokenizer, the student's.

    teachers: tokenizers of the teachers, of those that are here. ends: what ends a response of
    each, of those whose tokenizer is here. written: the chat templates of teachers' checkpoints.
    tokenizer: None, and absent: a line for each, where `opd check` plans with what is not here.
    template: what the tokenizer renders chats with. notes: what the user should know.
    """

    models: RunModels
    tokenizer: PreTrainedTokenizerBase | None
    absent: tuple[str, ...]
    ends: Mapping[Role, EndTokens]
    teachers: Mapping[Role, PreTrainedTokenizerBase] = field(
        default_factory=dict[Role, "PreTrainedTokenizerBase"]
    )
    written: Mapping[Role, Source] = field(default_factory=dict[Role, "Source"])
    template: RunTemplate = field(default_factory=RunTemplate)
    notes: tuple[str, ...] = ()

    @property
    def student(self) -> ModelFacts:
        """Returns the student's model."""
        return self.models.student


def check_models(config: Config, *, plan: bool = False, teachers: bool = True) -> CheckedModels:
    """Check that student and teachers exist, are supported, and share tokenizer and vocabulary.

    With scoring.alignment the teacher has its own.

    teachers: whether there are any to be checked. plan: a model without weights here is checked as
    far as its files go, as it may be on another machine; a model with weights must be whole. Raises
    UserError.
    """
    models = read_models(config, teachers=teachers)
    student, served = models.student, models.every
    notes = cut_notes(student)
    absent = {
        role: "weights" if has_tokenizer(facts.path) else "weights and tokenizer"
        for role, facts in served.items()
        if plan and not has_weights(facts.path)
    }
    if STUDENT not in absent:
        check_weights(student.path, "student.model", student.spec)
    for role, facts in models.teachers.items():
        if role not in absent:
            served_tensors(facts.path, f"{role}.model", facts.raw)
    tokenizer = None
    ends: dict[Role, EndTokens] = {}
    of_teachers: dict[Role, PreTrainedTokenizerBase] = {}
    if STUDENT not in absent or has_tokenizer(student.path):
        tokenizer = load_tokenizer(student.path, "student.model")
        check_cut(student, tokenizer)
        ends[STUDENT] = ends_of(config, "student.model", models.student.served, tokenizer)
        for role, facts in models.teachers.items():
            if role not in absent or has_tokenizer(facts.path):
                key, aligned = f"{role}.model", config.scoring.alignment is not None
                if aligned:  # its ids are others
                    theirs = load_tokenizer(facts.path, key)
                else:
                    theirs = check_tokenizer(facts.path, key, tokenizer, config.scoring.guard)
                    notes += further_notes(config, key, tokenizer, theirs)
                    check_padding(key, facts.vocab_size, student.vocab_size, tokenizer)
                of_teachers[role] = theirs
                ends[role] = ends_of(config, key, facts, theirs, asks=not aligned)
    check_support(config, student)
    check_context(config, models)
    check_sharding(config, models)
    check_latent(config, models)
    check_memory(config, models)
    lines = (f"{role}.model {served[role].path}: {what} not here" for role, what in absent.items())
    return CheckedModels(models, tokenizer, tuple(lines), ends, of_teachers, notes=tuple(notes))


def ending_of(config: Config, models: CheckedModels) -> Ending:
    """Return what ends a response of the run, besides its row's own strings."""
    return Ending(models.ends[STUDENT].ids, config.rollout.stop)


def ends_of(
    config: Config,
    key: str,
    facts: ServedFacts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    asks: bool = True,
) -> EndTokens:
    """Return what ends a response of a model in this run; `key` names it. Raises UserError.

    asks: whether rollout.stop_token_ids are ids of it.
    """
    asked = config.rollout.stop_token_ids if asks else ()
    beyond = next((each for each in asked if each >= facts.vocab_size), None)
    if beyond is not None:
        raise UserError(
            f"rollout.stop_token_ids must be ids below {key}'s vocab_size {facts.vocab_size}, "
            f"got {beyond}"
        )
    try:
        return read_end_tokens(
            facts.path,
            facts.raw,
            facts.vocab_size,
            tokenizer,
            default_end(facts.path),
            asked,
        )
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def further_notes(
    config: Config, key: str, ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase
) -> list[str]:
    """Return a line on tokens that a teacher has and the student lacks. Raises UserError.

    Its log-prob of an id of the student's is then that of all its tokens, and KL(student ||
    teacher) is exact, as the student has no probability on the others. A teacher that selects ids
    itself may select one of the others, of which the student has no token.
    """
    further = further_tokens(ours.get_vocab(), theirs.get_vocab(), key)
    if not further:
        return []
    named = f"{len(further)} more tokens than student.model's, such as {shown(min(further), 60)}"
    if config.estimator.reads_teacher and config.estimator.support.owner == "teacher":
        raise UserError(
            f"{key} has {named}: with support.type {config.estimator.support.type} the teacher "
            "selects what is compared, and may select one of them; use a support of the student's"
        )
    return [
        f"{key} has {named}; every id of the student's means the same to it, and its log-probs "
        "are those of all its tokens; text that it writes in an evaluation is read without them"
    ]


def read_models(config: Config, *, teachers: bool = True) -> RunModels:
    """Read every role's model. Raises UserError."""
    roles = teacher_roles(config) if teachers else {}
    by = answering(config)
    return RunModels(
        cut_vocabulary(config, read_model(config.student.model, "student.model")),
        {role: read_teacher(config, role) for role in roles.values()},
        frozenset(role for name, role in roles.items() if by[name] == STUDENT),
    )


def check_memory(config: Config, models: RunModels) -> None:
    """Check that each GPU can hold what is planned for it. Raises UserError."""
    longest = longest_sample(config, models.student)
    problem = planning_learner.refusal(models.student.spec, config.learner, longest)
    for role, facts in models.served.items():
        section = section_of(config, role)
        context = section.context_length or facts.context_length
        problem = problem or planning_servers.refusal(role, facts.size, section, context)
    if problem is not None:
        raise UserError(problem)


def longest_sample(config: Config, student: ModelFacts) -> int:
    """Return the tokens of the longest sequence, given and sampled, that a run may train on."""
    return sum(longest_row(config, student))


def longest_row(config: Config, student: ModelFacts) -> tuple[int, int]:
    """Return the given and the sampled tokens of the longest sequence that a run may train on."""
    most = config.rollout.max_new_tokens
    if config.environment is None:
        return prompt_limit(config, student), most
    limits = trajectory_limits(config.environment, most)
    sampled = min(limits.most_sampled, limits.max_tokens - 1)  # behind a prompt
    return limits.max_tokens - sampled, sampled


def cut_vocabulary(config: Config, student: ModelFacts) -> ModelFacts:
    """Return the student with the ids that every teacher can score.

    A teacher may have more ids. log q of the student's ids is then still that of the whole teacher,
    and KL(p || q) is exact, since p is 0 on the others. What the teacher selects itself is another
    matter: see FleetScorer.
    """
    return replace(student, vocab_size=num_shared_ids(config) or student.vocab_size)


def cut_notes(student: ModelFacts) -> list[str]:
    """Return a line on the student's ids that a run leaves out, if there are any."""
    rows, used = student.spec.vocab_size, student.vocab_size
    if used == rows:
        return []
    return [
        f"student.model has {rows} rows in its vocabulary, a teacher only {used}: ids from {used} "
        "on, which no text uses, have probability 0 for servers and learner; exports keep their "
        "rows"
    ]


def check_cut(student: ModelFacts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the ids which a teacher lacks are padding, never used by text."""
    rows, used = student.spec.vocab_size, student.vocab_size
    largest = max(tokenizer.get_vocab().values())
    if used <= largest < rows:
        raise UserError(
            f"student.model may have more ids than a teacher's vocab_size {used} only as padding, "
            f"but the tokenizer uses id {largest}; pad the teacher's embedding and head to "
            f"{rows} rows, or where its tokenizer is another one set scoring.alignment "
            "(docs/tokenizers.md)"
        )


def check_padding(
    key: str, teachers: int, students: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check that ids which a teacher has and the student lacks are padding, never used by text."""
    largest = max(tokenizer.get_vocab().values())
    if students <= largest < teachers:
        raise UserError(
            f"{key} may have more ids than student.model's vocab_size {students} only as padding, "
            f"but the tokenizer uses id {largest}; pad the student's embedding to {teachers} rows"
        )


def check_support(config: Config, student: ModelFacts) -> None:
    """Check that a support of the whole vocabulary is used only where that is small."""
    if config.estimator.support.type == "exact" and student.vocab_size > MAX_ATOMS:
        raise UserError(
            f"support.type exact caches the whole vocabulary, which may have at most {MAX_ATOMS} "
            f"ids, got {student.vocab_size}; use support.type atoms_tail"
        )


def check_context(config: Config, models: RunModels) -> None:
    """Check that the longest allowed prompt and response fit the context of every model."""
    limits: dict[Role, int] = {}
    for key, facts in models.served.items():
        section = section_of(config, key)
        limits[key] = limit = section.context_length or facts.context_length
        if limit > facts.context_length:
            raise UserError(
                f"{key}.context_length must be <= the model's max_position_embeddings "
                f"{facts.context_length}, got {limit}"
            )
        if key == STUDENT:
            check_window(f"{key}.context_length", models.student.spec, limit)
        for asking, wanted in (
            ("rollout", config.rollout.max_new_tokens),
            ("evaluation", config.evaluation.max_new_tokens or 0),
            *((f"data.heldout.{n}", s.max_new_tokens or 0) for n, s in config.data.heldout.items()),
        ):
            if wanted >= limit - RESERVED_TOKENS:
                raise UserError(
                    f"{asking}.max_new_tokens must be < the {key}'s context of {limit} tokens, "
                    f"minus {RESERVED_TOKENS} that SGLang keeps free, got {wanted}"
                )
        if section.max_total_tokens is not None and section.max_total_tokens < limit:
            raise UserError(
                f"{key}.max_total_tokens must hold the {key}'s context of {limit} tokens, "
                f"got {section.max_total_tokens}; lower {key}.context_length or raise it"
            )
        if limit < limits[STUDENT]:
            raise UserError(
                f"{key}.context_length must be >= student.context_length: a teacher scores whole "
                f"rollouts, got {limit} and {limits[STUDENT]}"
            )


def check_inputs_are_kept(config: Config) -> None:
    """Check that no file that a run reads lies where --overwrite removes an earlier run."""
    run_dir = config.run.dir.resolve()
    teachers = config.all_teachers.items()
    for key, path in (
        ("student.model", config.student.model),
        *((f"{key_of_teacher(name)}.model", section.model) for name, section in teachers),
        *(("data.train", file.path) for file in config.data.train),
        *((f"data.heldout.{name}", each.file) for name, each in config.data.heldout.items()),
    ):
        if path.resolve().is_relative_to(run_dir):
            raise UserError(f"{key} must lie outside run.dir {config.run.dir}, got {path}")


def check_sharding(config: Config, models: RunModels) -> None:
    """Check that the learner's layout and the servers' tp and ep divide the models evenly."""
    try:
        models.student.spec.check_parallel(
            config.learner.parallel, uneven=config.learner.uneven_stages
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    check_megatron(models.student.spec, config.learner)
    for key, facts in models.served.items():
        section, size = section_of(config, key), facts.size
        rules = [
            ("tp", section.tp, "attention heads", size.num_heads),
            ("tp", section.tp, "feed-forward features", size.ffn_size),
            ("ep", section.ep, "experts", size.num_experts),
        ]
        if size.delta_net is not None:
            rules.append(("tp", section.tp, "key heads of delta nets", size.delta_net.keys))
        if size.shared_ffn_size:
            rules.append(("tp", section.tp, "shared experts' features", size.shared_ffn_size))
        for name, degree, what, count in rules:
            if degree > 1 and (count == 0 or count % degree):
                raise UserError(
                    f"{key}.{name} must divide the model's {what}, "
                    f"got {name}={degree} and {count} {what}"
                )
        heads, family = size.num_kv_heads, FAMILIES.get(facts.raw.get("model_type", ""))
        if family is not None and section.tp > heads and not family.shares_heads:
            raise UserError(
                f"{key}.tp must be <= the model's key-value heads, because SGLang 0.5.23 cannot "
                f"share one among ranks in a {family.name} model, got tp={section.tp} and "
                f"{heads} key-value heads"
            )
        if family is not None and section.quantization is not None and family.own_modules:
            raise UserError(
                f"{key}.quantization must be null in a {family.name} model, of which SGLang "
                f"0.5.23 runs transformers' modules, got {section.quantization}"
            )
        if size.delta_net is not None and section.quantization is not None:
            raise UserError(
                f"{key}.quantization must be null in a model with gated delta nets, of which no "
                f"test here has run a quantised server, got {section.quantization}"
            )
        if family is not None and section.quantization is not None and family.expert_biases:
            name = MEASURED[family.architecture].published
            raise UserError(
                f"{key}.quantization must be null in a {name} model, of whose experts' biases a "
                f"quantised server knows nothing, got {section.quantization}"
            )
        if max(section.tp, heads) % min(section.tp, heads):
            raise UserError(
                f"{key}.tp must divide the model's key-value heads or be a multiple of them, "
                f"got tp={section.tp} and {heads} key-value heads"
            )


def check_latent(config: Config, models: RunModels) -> None:
    """Check that nothing is asked of latent attention that servers do not have for it."""
    for key, facts in models.served.items():
        if not facts.size.latent_kept:
            continue
        quantised = section_of(config, key).quantization
        if quantised is not None:
            raise UserError(
                f"{key}.quantization must be null with latent attention, of whose matrices SGLang "
                f"keeps copies in other numbers, got {quantised}"
            )
        if config.run.deterministic:
            raise UserError(
                f"run.deterministic must be false with latent attention, as {key}.model has it: "
                "its products depend on what is computed beside them; leave it out"
            )


def prompt_limit(config: Config, student: ModelFacts) -> int:
    """Return the longest prompt, in tokens, that leaves room to sample and score a response."""
    context = config.student.context_length or student.context_length
    room = context - RESERVED_TOKENS - config.rollout.max_new_tokens
    environment = config.environment
    if environment is not None and environment.max_tokens > context - RESERVED_TOKENS:
        raise UserError(
            "environment.max_tokens must be at most the context of the student's servers less "
            f"{RESERVED_TOKENS}, {context - RESERVED_TOKENS}, got {environment.max_tokens}; lower "
            "it, or raise student.context_length"
        )
    return min(config.data.max_prompt_tokens, room)


def teacher_prompt_limit(config: Config, models: RunModels) -> int:
    """Return the longest prompt, in tokens, behind which every teacher can score a response."""
    contexts = [
        section_of(config, role).context_length or facts.context_length
        for role, facts in models.every.items()
        if role != STUDENT
    ]
    room = RESERVED_TOKENS + config.rollout.max_new_tokens
    return max(0, min(contexts, default=0) - room)


def check_ends(key: str, info: ServerInfo, ends: EndTokens) -> None:
    """Check that a server ends responses where the run takes them to end. Raises UserError.

    A server without a tokenizer does not know that one's; requests name them.
    """
    ours, theirs = set(ends.model), set(info.ends.model)
    if info.ends.tokenizer is not None:
        ours, theirs = ours | set(ends.tokenizer), theirs | set(info.ends.tokenizer)
    if ours != theirs:
        raise UserError(
            f"{key}: {info.url} must end responses at ids {sorted(ours)}, as config.json, "
            f"generation_config.json and tokenizer of its model here say, got {sorted(theirs)}: "
            "give it the same files, and no option that changes them"
        )
