"""Defines the sections of a run's configuration, each with the rules on its own keys.

Every value has its unit in its name or docstring. Nothing is written to a config after load;
whatever can be derived is a property.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_opd.config.alignment import AlignmentConfig
from megatron_opd.config.curriculum import PassRateCurriculum
from megatron_opd.config.evaluation import HeldoutSet, heldout_sets
from megatron_opd.config.import_path import is_import_path
from megatron_opd.config.section import (
    OFF_IS_A_WORD,
    ByteCount,
    ChatTemplate,
    Concurrency,
    FilePath,
    Host,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Said,
    Seconds,
    Section,
    Stops,
    Temperature,
    TemplateKwargs,
)
from megatron_opd.config.train_files import TrainFiles
from megatron_opd.config.wording import shown
from megatron_opd.records.mixtures import weights_fault
from sglang_bridge.weights.formats import Grid

DEFAULT_TEACHER = "teacher"
Guard = Annotated[Literal["refuse", "warn", "off"], OFF_IS_A_WORD]


class RunConfig(Section):
    """Says where a run writes, how many updates it makes and what seeds it."""

    dir: FilePath = Path("runs/run")
    """Run directory: metrics, checkpoints, logs and the final model are written here. One run at a
    time holds it."""
    max_steps: PositiveInt = 100
    """Number of learner updates to make. New weights go to the samplers after each of them, or
    after every schedule.sync_every-th. Raising it trains longer, at the same cost per update."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds every random generator of the run; server i of a role draws from seed + i."""
    deterministic: bool = False
    """Makes a run repeatable: the same run twice, or interrupted and resumed, makes bitwise the
    same updates, because what is sampled depends on seed, prompt and weights alone. Costs speed:
    kernels with a fixed order of summation are used, and training waits for the batches in between.
    Needs schedule.type controlled or sync, otherwise timing decides which weights
    sample what."""


COLUMN_KEYS = (
    "prompt_key",
    "answer_key",
    "tools_key",
    "teacher_prompt_key",
    "teacher_key",
    "task_key",
    "id_key",
    "max_new_tokens_key",
    "stop_key",
    "reward_weight_key",
    "teacher_weight_key",
)
"""Keys of data that name columns."""


class DataConfig(Section):
    """Names the prompt files, with a `prompt` and an optional `answer` column (docs/data.md)."""

    train: TrainFiles
    """Prompts to learn on: a file of JSONL, JSON, parquet or CSV, a folder of such files or a
    pattern such as data/train-*.parquet, a directory that `save_to_disk` of the library datasets
    has written, or MODULE:FUNCTION, a function of your own that returns the rows as mappings, the
    same ones every time. Or a list of them, which are read as one file; or of mappings with `path`
    and `weight`: then each prompt is drawn from a file with the probability weight / sum of
    weights, and a file that is read to its end begins again."""
    epochs: PositiveInt | None = None
    """Ends the run, before run.max_steps, once data.train is used up: when a file would be read
    more than this many times. Samples that are left and fill no batch are dropped and counted
    (incomplete_batch). null: the data is read again and again. Raising it trains longer on the same
    prompts."""
    heldout: dict[str, HeldoutSet] = Field(default_factory=dict[str, HeldoutSet])
    """Problems to evaluate on: a file, or several sets by name, each a file or a mapping with
    `file` and, where the set differs from `evaluation`, `problems`, `samples`, `temperature` and
    `max_new_tokens`. A file alone is a set named heldout. Null: no evaluation. Each set costs its
    problems * samples responses. Keep them disjoint from data.train."""
    task: str = "arithmetic"
    """Name of the verifier that computes rewards and evaluation scores (docs/verifiers.md):
    arithmetic, exact, math, multiple_choice, json_schema, code, none, or MODULE:FUNCTION, a
    function of your own that takes a response and an answer and returns whether the response is
    right, or a reward from 0 to 1. The section `verifier` limits them."""
    prompt_key: str = "prompt"
    """Name of the column that holds the prompt: text, or with data.chat_template a list of messages
    (docs/data.md). Like all keys that name columns, it may lead into one, by names and indices
    divided by dots, such as extra_info.question."""
    tools_key: str = "tools"
    """Name of the column that holds the tools which come with a prompt, a list of schemas or its
    JSON text, for the chat template; rows may lack it. Read with data.chat_template only."""
    answer_key: str = "answer"
    """Name of the column that holds the reference answer."""
    teacher_key: str | None = None
    """Name of the column that names the teacher of a prompt (a key of `teachers`, or "teacher"), or
    holds a mixture of them, such as {"math": 0.7, "code": 0.3} (scoring.mixture); null: all prompts
    are scored alike."""
    teacher_prompt_key: str | None = None
    """Name of the column that holds what the teacher reads instead of the prompt, text or messages
    as prompt_key: such as the prompt with a solution, a hint or a rubric, which the student never
    sees. It is rendered as prompts are, and the student's response follows it, id by id. For
    self-distillation give teacher.model the student's. Costs the teacher the tokens of its prompt.
    null: the teacher reads the student's prompt."""
    without_teacher_prompt: Literal["score", "skip"] = "score"
    """What becomes of rows whose column teacher_prompt_key is missing, null or blank: score, their
    teacher reads the student's prompt, and a note counts them; skip: they are not used, and are
    counted, but not as unusable ones (max_bad_fraction)."""
    reward_weight_key: str | None = None
    """Name of a column with a number >= 0 that multiplies the objective's terms from rewards on the
    responses to a prompt (1 where it is null or missing); 0: they learn from no reward and need no
    answer. For mixtures of rewards and a teacher. null: 1 for all."""
    teacher_weight_key: str | None = None
    """Name of a column with a number >= 0 that multiplies the objective's other terms on the
    responses to a prompt (1 where it is null or missing); 0: they learn from rewards alone, and no
    teacher is asked for their scores. For mixtures of rewards and a teacher. null: 1 for all."""
    task_key: str | None = None
    """Name of the column that names a row's verifier: a built-in one, or what data.task names;
    rows may lack it. A mixture of files can so be judged each in its own way. null: data.task
    judges all."""
    tasks: dict[str, str] = Field(default_factory=dict[str, str])
    """Verifiers of values of the column task_key that are no verifiers' names, such as the data
    sets of {openai/gsm8k: math, lighteval/MATH: math}: built-in ones, or MODULE:FUNCTION. Needs
    task_key. Each MODULE:FUNCTION more is imported by every worker."""
    id_key: str = "id"
    """Name of the column that holds a row's own name, text or a number; rows may lack it, and are
    then named by file and line."""
    max_new_tokens_key: str | None = None
    """Name of the column that holds the largest number of tokens of a prompt's response; rows may
    lack it. null: rollout.max_new_tokens for all, which none may exceed."""
    stop_key: str | None = None
    """Name of the column that holds the strings (one, or a list) that end a response to the prompt,
    besides rollout.stop; rows may lack it. null: no column."""
    chat_template: ChatTemplate = False
    """Wraps each prompt as one user message with a chat template. true: the tokenizer's; a path:
    that Jinja file, which checkpoints and exported models keep a copy of; false: a prompt is its
    text. Turn it on for models trained on chats; prompts become a few tokens longer."""
    system_prompt: Said | None = None
    """System message in front of every prompt, of data.heldout too, that has none of its own; null:
    none but the template's own. Costs its tokens in every prompt. Needs chat_template: true."""
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict[str, Any])
    """Variables of the chat template, such as `enable_thinking: false`; a note says which of them
    the template does not read. Needs chat_template: true."""
    continue_assistant: bool = False
    """Lets a prompt end with an assistant's message, which the response continues; false: such rows
    cannot be used. Needs chat_template: true."""
    max_prompt_tokens: PositiveInt = 1024
    """Largest number of tokens of a prompt, with the chat template; longer prompts are counted and
    skipped. Raising it keeps more prompts and needs more memory per sample."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of a file's rows that may be unusable: malformed, an empty prompt, a wrong
    type, or no answer where rewards or an evaluation need one. Such rows are counted and skipped
    before anything starts; above this share the file is rejected. 0 rejects the file at the first
    unusable row. Rows that are only too long do not count. Of more than 64 MiB of training data the
    rows read so far count, and the run ends where more of them are unusable than chance explains.
    Raising it trains on what is left of a damaged file."""
    shuffle: bool = True
    """Draws a new order of the prompts every epoch, from run.seed; false keeps the order of the
    file."""
    curriculum: PassRateCurriculum | None = None
    """Passes over prompts that are too easy or too hard, by their pass rate so far; null: every
    prompt is taken when its turn comes."""

    @field_validator("heldout", mode="before")
    @classmethod
    def _sets_by_name(cls, value: Any) -> Any:
        return heldout_sets(value)

    @model_validator(mode="after")
    def _columns_differ(self) -> DataConfig:
        columns = {key: name for key in COLUMN_KEYS if (name := getattr(self, key)) is not None}
        names = list(columns.values())
        twice = [key for key, name in columns.items() if names.count(name) > 1]
        if twice:
            raise ValueError(
                f"{' and '.join(twice)} must name different columns, "
                f"got {', '.join(shown(columns[key]) for key in twice)}"
            )
        return self

    @model_validator(mode="after")
    def _only_a_column_has_values(self) -> DataConfig:
        if self.tasks and self.task_key is None:
            raise ValueError(
                f"tasks needs task_key, the column of its values, got {shown(self.tasks)} without "
                "it; set task_key or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _only_a_column_is_lacked(self) -> DataConfig:
        if self.teacher_prompt_key is None and self.without_teacher_prompt != "score":
            raise ValueError(
                "without_teacher_prompt needs teacher_prompt_key, the column that rows may lack, "
                f"got {self.without_teacher_prompt} without it; set it or leave this out"
            )
        return self

    @model_validator(mode="after")
    def _only_a_template_has_messages(self) -> DataConfig:
        if not self.chat_template:
            for key in ("system_prompt", "chat_template_kwargs", "continue_assistant"):
                if getattr(self, key):
                    raise ValueError(
                        f"{key} needs chat_template: true or a file, got "
                        f"{shown(getattr(self, key))} without it; set chat_template: true or "
                        "leave it out"
                    )
        return self


class RolloutConfig(Section):
    """Says how the student samples: the behaviour distribution, whose log-probs are cached."""

    temperature: Temperature = 1.0
    """Divides the logits, in sampling and in the student's log-probs of the loss. Below 1 sharpens
    the distribution and loses diversity; 0.01 is the least that float32 logits can represent."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: share of probability mass that is sampled from. Below 1 the sampler no
    longer covers the student's distribution: rejected wherever the loss has an importance ratio to
    the sampler, and the learner-sampler mismatch is not measured."""
    max_new_tokens: PositiveInt = 1024
    """Largest number of tokens of a response; longer ones are cut off. Raising it costs sampling
    time, memory and scoring in proportion."""
    stop: Stops = ()
    """Strings that end a response, besides the model's end tokens, as soon as its text holds one.
    The response keeps the string: what is scored and learnt is exactly what was sampled, and its
    last token may spell more than the string. Costs the servers the decoding of the last tokens at
    every token."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Ids that end a response, besides those of the student's config.json, generation_config.json
    and tokenizer: a base student that learns from an instruct teacher ends where the teacher does
    with the teacher's. Exported checkpoints name them in generation_config.json. Each more is one
    more token that cuts an answer short where the student uses it for something else."""
    concurrency: Concurrency = 64
    """Largest number of rollouts in flight over all student servers; the staleness permits
    (schedule.max_staleness) limit it too. Raising it increases throughput until the servers' queues
    fill."""
    group_size: PositiveInt = 1
    """Number of responses sampled per prompt (G, the group of GRPO); objectives that compare
    responses need at least 2. Raising it lowers the variance of group advantages and leaves fewer
    prompts per batch."""
    attempts: PositiveInt = 3
    """Tries per rollout while its requests get no answer, 429 or 5xx; then its prompt is dropped
    and counted (timed_out, student_unreachable, student_unavailable). Each try samples anew and is
    counted in rollouts_restarted; one whose server is lost does not count. Raising it spends more
    time on a prompt that no server can sample."""
    seeded: bool = True
    """Draws every token by random numbers of its prompt and position, so that a response that is
    sampled anew is the same draw and being cut off favours no length (docs/schedules.md). Costs
    nothing on a CPU. On a GPU a kernel computes a float64 number per id of the vocabulary at each
    step, which has not been timed, and with top_p below 1 there is a sort, instead of the server's
    own sampling kernels: false where that matters and requests are rarely cut off."""


class ScoringConfig(Section):
    """Says how rollouts are sent to the teachers for scoring."""

    concurrency: Concurrency = 32
    """Largest number of scoring requests in flight over all teacher servers. Raising it keeps the
    teachers busier and holds more memory there."""
    attempts: PositiveInt = 3
    """Tries per sample before it is dropped and counted (teacher_unavailable, teacher_timed_out,
    teacher_unreachable), and per request of the guard before the run ends; one whose server is lost
    does not count. Raising it outlasts longer overload."""
    temperature: Temperature = 1.0
    """Divides the teacher's logits: q is softmax(logits / temperature). Raising it flattens q."""
    mixture: dict[str, float] = Field(default_factory=dict[str, float])
    """Weights of several teachers, by name, that score every prompt together, such as {math: 0.7,
    code: 0.3}: q is the sum of weight * q of each. They sum to 1; a teacher of weight 0 is not
    asked. A prompt's own mixture is data.teacher_key's. Empty: one teacher scores a prompt. Each
    teacher more asks its servers for as many scores again, one teacher after the other."""
    alignment: AlignmentConfig | None = None
    """For a teacher whose tokenizer is another one: it reads the text that the student writes in
    tokens of its own, in teacher.chat_template (docs/tokenizers.md). null: it must be the
    student's. Costs the controller the cutting of every response."""
    guard: Guard = "refuse"
    """What to do about a teacher whose answers make no sense: a tokenizer other than the student's,
    scores that differ from the log-probs it samples with or from those of another program, or
    scores that are constant or those of a uniform distribution. refuse: the run does not start, or
    stops after guard_stop_after updates; warn: one line on the terminal; off: no check. The check
    before the first update costs each server 8 short responses, the student's 16, and this machine
    a forward pass of the teacher on its processors (left out, and said so, where memory is short).
    A model with random weights may be nearly uniform: use `warn` or `off` to let it teach."""
    guard_stop_after: NonNegativeInt = 3
    """Number of consecutive updates with senseless answers of a teacher after which the run stops,
    with guard refuse; 0: it never stops and only warns. Raising it tolerates longer disturbances
    and wastes more updates on a broken teacher."""

    @field_validator("mixture")
    @classmethod
    def _mixture_sums_to_one(cls, mixture: dict[str, float]) -> dict[str, float]:
        fault = weights_fault(mixture) if mixture else None
        if fault is not None:
            raise ValueError(fault)
        return mixture


class BufferConfig(Section):
    """Sizes the batches."""

    batch_size: PositiveInt = 64
    """Samples per learner update (B). Raising it lowers the variance of the gradient and costs time
    and memory per update in proportion."""


TRANSPORTS = {
    "shards": "megatron_opd.weight_sync.shards:SHARDS",
    "broadcast": "megatron_opd.weight_sync.broadcast:BROADCAST",
    "disk": "megatron_opd.weight_sync.disk:DISK",
}
"""Where the weight transports are, by `weight_sync.type`."""


CLEANUP = 0.2
"""Share of a weight sync's time that is kept for what follows a failed try."""


class WeightSyncConfig(Section):
    """Says how new weights reach the student servers."""

    type: str = "shards"
    """Weight transport. shards: every rank of the learner sends each server rank what that rank
    holds, straight into its parameters. broadcast: the learner's rank 0 gathers every tensor and
    broadcasts it to all ranks of all servers, which is slower and takes any server. disk: every
    rank of the learner writes its share to weight_sync.directory, and each server rank reads what
    it holds; for servers that share a file system with the learner and no network. MODULE:NAME:
    your own (docs/extending.md)."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Backend of torch.distributed that carries the weights: auto takes nccl where the learner has
    GPUs, gloo elsewhere and where `opd run` has placed learner and student servers on one GPU
    (cluster.share_gpus). gloo on GPUs copies through host memory, slower; see same_host."""
    same_host: Literal["auto", "off"] = "auto"
    """How weights travel between ranks on one host in a gloo group: auto lets them pass through
    memory that both see, on GPUs through CUDA IPC, wherever both can open it; off sends all through
    the group. auto costs each learner rank 64 MiB, of its GPU's memory if its weights are there.
    NCCL groups find such ways by themselves. type: shards."""

    match: Literal["require", "prefer", "off"] = "prefer"
    """What to do where learner and student servers are cut differently or differ in dtype, which
    widens the gap between their log-probs: require rejects the configuration, or servers started
    elsewhere by what they say themselves, prefer warns, off is silent."""
    bucket_bytes: ByteCount = 512 * 2**20
    """Largest size in bytes of one bucket of weights. Raising it sends fewer, larger messages;
    every rank of learner and servers holds at most two (broadcast: one) while weights are sent."""
    timeout_s: Seconds = 300.0
    """Longest time in seconds that a weight sync may take, all tries that count together; then the
    run ends with an error. Raise it for large models on slow networks."""
    tries: PositiveInt = 3
    """Number of times that a weight sync is tried. Servers that are lost or fail twice are given up
    while student.min_servers are left; a try that lost one does not count, except with 1, which
    never tries again. Raising it leaves each try a smaller part of timeout_s."""
    host: Host = "127.0.0.1"
    """Host name or IPv4 address on which the learner's rank 0 listens for the servers' ranks during
    a weight sync. What the learner was given counts: it tells the servers."""
    round_to: Grid | None = None
    """Rounds weight matrices to this grid before they are sent (a row's largest magnitude sets its
    scale), to study the mismatch between learner and a low-precision sampler; null sends them
    unchanged. int4 and int3 widen the gap of small models, which eight bits barely move. Only the
    values are rounded: the servers hold them in their dtype and save no memory, which
    student.quantization does. The learner keeps its own precision."""
    staging: bool = False
    """Receives weights into shadow buffers while the servers sample, so that they pause only while
    they copy them. Costs each server rank the memory of its share of the weights. type: shards."""
    staging_bytes: ByteCount | None = None
    """Largest size in bytes of a server rank's shadow buffers; the rest of its weights is received
    while the server is paused. null: room for all of them."""
    overlap: bool = False
    """Lets the learner begin its next update while the version it has just made is on its way: each
    rank sends from a copy of its shards. Costs each learner rank the memory of its shards in
    learner.dtype. At most one update runs beside a weight sync, and none where the permits of
    schedule.max_staleness leave no scored batch. type: shards."""
    relay: bool = False
    """Lets servers pass on what they receive to other servers of their layout: of each slice a
    learner rank then sends one copy, not one to every server that it serves. Pays on a network that
    is the limit, where `opd check` shows that a learner rank sends more than a server rank
    receives: with more server ranks than learner ranks. Costs twice the buffers in servers, and the
    time of one bucket for each server of a chain. Servers must reach each other. type: shards."""
    directory: FilePath | None = None
    """Directory in which versions of the weights are written and read, on a file system that all
    ranks of the learner and all servers share; servers may have it under another path. Takes the
    weights' size for each version. type: disk."""
    keep_versions: PositiveInt = 2
    """Number of newest versions on disk that stay readable, besides the one being written; older
    ones are deleted once every server has a newer one. Raising it takes more disk space. type:
    disk."""
    delta: bool = False
    """Writes only the numbers that changed since the last version, compared as the servers hold
    them: of bfloat16 weights a small learning rate changes few. Costs each learner rank host memory
    for its share of the weights in the servers' dtype. type: disk."""
    full_every: PositiveInt = 10
    """Number of versions of which one is whole with delta: true. Raising it writes less, and keeps
    longer chains on disk, which a restarted server has to read. type: disk."""
    verify_every: NonNegativeInt = 0
    """Number of weight syncs between two that compare digests of every weight slice on the servers
    with the learner's weights; 0: only the first one of a run. Costs one pass over the weights
    on both sides."""

    @property
    def try_s(self) -> float:
        """Returns the seconds that one try may take."""
        return (1 - CLEANUP) * self.timeout_s / self.tries

    @property
    def cleanup_s(self) -> float:
        """Returns the seconds in which a server must answer after a failed try."""
        return CLEANUP * self.timeout_s / self.tries

    @model_validator(mode="after")
    def _only_shards_stage_overlap_and_relay(self) -> WeightSyncConfig:
        if self.staging and self.type == "broadcast":
            raise ValueError("staging needs type: shards, got type: broadcast")
        if self.staging_bytes is not None and not self.staging:
            raise ValueError("staging_bytes needs staging: true")
        for key in ("overlap", "relay"):
            if getattr(self, key) and self.type != "shards":
                raise ValueError(
                    f"{key} needs type: shards, got type: {self.type}; set {key}: false"
                )
        return self

    @model_validator(mode="after")
    def _only_disk_has_a_directory(self) -> WeightSyncConfig:
        if self.type == "disk" and self.directory is None:
            raise ValueError(
                "directory must name a directory that learner and servers share with type: disk, "
                "got null"
            )
        for key, value in (("directory", self.directory), ("delta", self.delta or None)):
            if self.type != "disk" and value is not None:
                raise ValueError(f"{key} needs type: disk, got type: {self.type}; leave it out")
        return self

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in TRANSPORTS and not is_import_path(name):
            raise ValueError(
                f"must be one of {', '.join(TRANSPORTS)} or your own as MODULE:NAME, "
                f"got {shown(name)}"
            )
        return name


class CheckpointConfig(Section):
    """Says which checkpoints are written and kept, and whether the final model is exported."""

    every: NonNegativeInt = 0
    """Number of updates between checkpoints that `--resume` can continue from; 0: not by count.
    Lower loses less work in a crash and writes more."""
    every_minutes: NonNegativeFloat = 10.0
    """Minutes after which a checkpoint is also written, at the end of an update; 0: not by time.
    With both 0 a crash loses everything. Every learner rank must see run.dir."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted. Raising it takes more disk
    space."""
    keep_every: NonNegativeInt = 0
    """Also keeps the checkpoints after every multiple of this many updates; 0: none besides the
    newest. Lower takes more disk space."""
    keep_best: bool = False
    """Also writes a checkpoint with each evaluation of evaluation.every, and keeps the best one by
    evaluation.best_metric; with export_hf its weights are written as a Hugging Face checkpoint
    (checkpoints/best) too. Costs a checkpoint for each evaluation, and the disk space of two: the
    best one and the one being evaluated."""
    async_save: bool = True
    """Writes checkpoints in the background: training waits only while the state is copied to host
    memory, which holds one more copy of it meanwhile."""
    grace_s: Seconds = 120.0
    """Seconds that a run which is preempted (SIGTERM, SIGUSR1) may take to end its update and write
    a last checkpoint; after that the one before stays the newest. Keep it some 20 s below what the
    scheduler waits, or it kills the run without a summary."""
    export_hf: bool = True
    """Writes the final student as a Hugging Face checkpoint into the run directory. Costs the size
    of the weights on disk."""

    @property
    def writes(self) -> bool:
        """Returns whether checkpoints to resume from are written."""
        return self.every > 0 or self.every_minutes > 0 or self.keep_best
