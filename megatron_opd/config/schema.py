"""The configuration: frozen, strict, torch-free. Every value has its unit in its name or docstring.

Nothing is written to a config after load; whatever can be derived is a property. Rules that involve
one key are stated on the field; rules that involve several are validators that name every key they
compare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]
Port = Annotated[int, Field(ge=1024, le=65535)]


class Section(BaseModel):
    """Base of every section: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class RunConfig(Section):
    """dir: the run directory. updates: learner updates (= publications) to make.

    seed: seeds every generator (server i of a role draws from seed + i).
    """

    dir: Path = Path("runs/run")
    updates: PositiveInt = 100
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234


class DataConfig(Section):
    """Prompt files are JSONL or parquet with a `prompt` and an optional `answer` column.

    chat_template: wrap each prompt as one user message through the tokenizer's chat template.
    max_prompt_tokens: longer prompts are counted and skipped. task: names the verifier.
    """

    train: Path
    heldout: Path | None = None
    task: str = "arithmetic"
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    chat_template: bool = False
    max_prompt_tokens: PositiveInt = 1024
    shuffle: bool = True


class ServerConfig(Section):
    """One role's SGLang servers.

    model: Hugging Face checkpoint. servers: how many. urls: servers started elsewhere (then none
    are started here). base_port: server i listens on base_port + i; 0 picks free ports. tp, ep:
    sharding inside a server. max_total_tokens: KV pool. extra_args: appended to the server's
    command line, one list item per argument.
    """

    model: Path
    servers: PositiveInt = 1
    urls: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    base_port: Annotated[int, Field(ge=0, le=65535)] = 0
    dtype: Dtype = "bfloat16"
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    context_length: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    max_running_requests: PositiveInt = 64
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.8
    startup_timeout_s: PositiveFloat = 600.0
    request_timeout_s: PositiveFloat = 600.0
    extra_args: tuple[str, ...] = ()

    @field_validator("urls")
    @classmethod
    def _whole_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Normalised: one server must have one name, for requests are counted by it."""
        named = tuple(url.strip().rstrip("/") for url in urls)
        for url in named:
            if not is_server_url(url):
                raise ValueError(f"each url must be http(s)://HOST:PORT, got {url!r}")
            if named.count(url) > 1:
                raise ValueError(f"each url must be given once, got {url!r} twice")
        return named

    @model_validator(mode="after")
    def _ep_divides_tp(self) -> ServerConfig:
        if self.tp % self.ep:
            raise ValueError(f"ep must divide tp, got ep={self.ep}, tp={self.tp}")
        return self

    @model_validator(mode="after")
    def _ports_exist(self) -> ServerConfig:
        last = self.base_port + self.servers - 1
        if self.base_port and not (self.base_port >= 1024 and last <= 65535):
            raise ValueError(
                "base_port must be 0 or leave every server a port in 1024..65535, "
                f"got base_port={self.base_port}, servers={self.servers}"
            )
        return self

    @property
    def ports(self) -> range:
        """Fixed ports of the servers started here; empty when free ones are picked."""
        count = self.servers if self.base_port and not self.urls else 0
        return range(self.base_port, self.base_port + count)


class RolloutConfig(Section):
    """How the student samples.

    temperature, top_p: the behaviour distribution (its exact log-probs are cached). With top_p < 1
    it does not cover the student: the divergence is then summed over the kept ids only (biased),
    and the learner-sampler mismatch is not measured.

    max_new_tokens: response limit. concurrency: rollouts in flight at once over the fleet; the
    permits bound it too.
    """

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt = 1024
    concurrency: PositiveInt = 64


class SupportConfig(Section):
    """What the draw cache holds. mc: m iid draws per response position, deduplicated (AsyncOPD sec.

    6).
    """

    type: Literal["mc"] = "mc"
    m: Annotated[int, Field(ge=1, le=64)] = 64


class ScoringConfig(Section):
    """concurrency: scoring requests in flight at once over the teachers.

    attempts: tries per sample before it is dropped.
    """

    concurrency: PositiveInt = 32
    attempts: PositiveInt = 3


class BufferConfig(Section):
    """batch_size: B, samples per learner update.

    max_staleness: tau, in versions; (tau + 1) B permits enforce it.
    """

    batch_size: PositiveInt = 64
    max_staleness: NonNegativeInt = 1

    @property
    def permits(self) -> int:
        """(tau + 1) B."""
        return (self.max_staleness + 1) * self.batch_size


class ObjectiveConfig(Section):
    """What the learner minimises.

    reverse_kl: the unclipped old-to-current IS surrogate with the advantage recomputed at learner
    time (AsyncOPD Eq. 15).

    max_ratio: truncation C of rho (TIS); null leaves rho untruncated.
    """

    type: Literal["reverse_kl"] = "reverse_kl"
    max_ratio: PositiveFloat | None = None


class ParallelConfig(Section):
    """Learner ranks = tp * pp * ep * dp.

    dp complete copies of the model, each spread over tp * pp * ep ranks.
    """

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    dp: PositiveInt = 1

    @property
    def world_size(self) -> int:
        """Learner ranks."""
        return self.tp * self.pp * self.ep * self.dp

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples: expert-parallel ranks do, as in Megatron-Core."""
        return self.ep * self.dp


class OptimizerConfig(Section):
    """AdamW with float32 main parameters. lr: peak. warmup_updates: linear from 0.

    clip_grad: global norm, 0 = off.

    schedule: after warm-up, `constant` or `cosine` down to min_lr at the last update.
    """

    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_updates: NonNegativeInt = 0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _min_below_peak(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr, got min_lr={self.min_lr}, lr={self.lr}")
        return self


class LearnerConfig(Section):
    """The Megatron-Core learner; it starts from student.model.

    mini_batches: optimizer steps per batch. tokens_per_microbatch: packing budget (prompt +
    response tokens of one rank's micro-batch; a longer sample gets a micro-batch of its own).
    threads: CPU threads a rank. listen: where the controller's ZeroMQ socket binds. timeout_s:
    longest wait for one reply of the learner.
    """

    parallel: ParallelConfig = ParallelConfig()
    dtype: Dtype = "bfloat16"
    mini_batches: PositiveInt = 1
    tokens_per_microbatch: PositiveInt = 8192
    recompute: bool = False
    optimizer: OptimizerConfig = OptimizerConfig()
    listen_host: str = "127.0.0.1"
    listen_port: Annotated[int, Field(ge=0, le=65535)] = 0
    threads: PositiveInt | None = None
    timeout_s: PositiveFloat = 1800.0


class WeightSyncConfig(Section):
    """bucket_bytes: largest flattened bucket.

    timeout_s: longest wait of any step of a publication; then the run fails.

    verify_first: after a run's first publication compare the fleet's tensor checksums with the
    learner's export.
    """

    bucket_bytes: PositiveInt = 512 * 2**20
    timeout_s: PositiveFloat = 300.0
    host: str = "127.0.0.1"
    verify_first: bool = True


class EvaluationConfig(Section):
    """avg@k (AsyncOPD Eq. 14): problems from data.heldout (0 = none), samples = k per problem.

    before, after: in `opd run`.
    """

    problems: NonNegativeInt = 64
    samples: PositiveInt = 4
    temperature: NonNegativeFloat = 1.0
    max_new_tokens: PositiveInt | None = None
    before: bool = True
    after: bool = True

    @property
    def runs(self) -> bool:
        """Whether `opd run` evaluates at all."""
        return self.problems > 0 and (self.before or self.after)


class CheckpointConfig(Section):
    """export_hf: write the final student as a Hugging Face checkpoint into the run directory."""

    export_hf: bool = True


class MetricsConfig(Section):
    """What a run records besides metrics.jsonl and summary.json."""

    tensorboard: bool = True
    trace: bool = True
    progress: bool = True


class Config(Section):
    """One run. See `opd check CONFIG.yaml` for a validated, resolved view."""

    run: RunConfig = RunConfig()
    data: DataConfig
    student: ServerConfig
    teacher: ServerConfig
    rollout: RolloutConfig = RolloutConfig()
    support: SupportConfig = SupportConfig()
    scoring: ScoringConfig = ScoringConfig()
    buffer: BufferConfig = BufferConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _rules_across_sections(self) -> Config:
        batch, minis = self.buffer.batch_size, self.learner.mini_batches
        dp = self.learner.parallel.data_parallel_size
        if batch % (minis * dp):
            raise ValueError(
                "buffer.batch_size must be a multiple of "
                "learner.mini_batches * (learner.parallel.ep * learner.parallel.dp), "
                f"got {batch} and {minis} * {dp}"
            )
        shared = set(self.student.ports) & set(self.teacher.ports)
        if shared:
            raise ValueError(
                "student.base_port and teacher.base_port must not share a port, "
                f"both would use {min(shared)}"
            )
        for role, section in (("student", self.student), ("teacher", self.teacher)):
            if self.learner.listen_port in section.ports:
                raise ValueError(
                    f"learner.listen_port and {role}.base_port must not share a port, "
                    f"both would use {self.learner.listen_port}"
                )
        return self


def is_server_url(url: str) -> bool:
    """Whether `url` is http(s)://HOST[:PORT][/prefix] and nothing more."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError when it is no port
    except ValueError:
        return False
    spaced = any(character.isspace() for character in url)
    plain = not (parts.query or parts.fragment or spaced)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


class SftConfig(Section):
    """`opd sft`: supervised fine-tuning on the same learner.

    train: JSONL or parquet with `prompt` and `response`. init: checkpoint to start from, or a
    directory that holds only config.json and the tokenizer (random initialisation). output: where
    the Hugging Face checkpoint is written.
    """

    run: RunConfig = RunConfig()
    init: Path
    output: Path
    train: Path
    prompt_key: str = "prompt"
    response_key: str = "response"
    batch_size: PositiveInt = 64
    learner: LearnerConfig = LearnerConfig()
    save_dtype: Dtype = "bfloat16"
