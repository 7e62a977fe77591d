"""The sections of a run's configuration, each with the rules on its own keys.

Every value has its unit in its name or docstring. Nothing is written to a config after load;
whatever can be derived is a property.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from megatron_opd.config.learner import Dtype
from megatron_opd.config.section import (
    OFF_IS_A_WORD,
    ByteCount,
    Concurrency,
    FilePath,
    Host,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Temperature,
    Texts,
    is_host,
)
from megatron_opd.config.wording import shown

DEFAULT_TEACHER = "teacher"
Guard = Annotated[Literal["refuse", "warn", "off"], OFF_IS_A_WORD]


class RunConfig(Section):
    """One run: where it writes, how long it is, what seeds it."""

    dir: FilePath = Path("runs/run")
    """The run directory."""
    updates: PositiveInt = 100
    """Learner updates to make; each is published."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seeds every generator; server i of a role draws from seed + i."""
    deterministic: bool = False
    """The same run twice, or interrupted and resumed, makes bitwise the same updates: what is
    sampled depends on seed, prompt and weights alone. Needs buffer.hold_batches equal to
    buffer.max_staleness, else time decides which weights sample what."""


class DataConfig(Section):
    """Prompt files: JSONL or parquet with a `prompt` and an optional `answer` column."""

    train: FilePath
    """Prompts to learn on: a JSONL or parquet file, or MODULE:FUNCTION, a function of your own that
    returns the rows as mappings, the same ones every time."""
    heldout: FilePath | None = None
    """Problems to evaluate on."""
    task: str = "arithmetic"
    """Names the verifier: arithmetic, exact, none, or MODULE:FUNCTION, a function of your own that
    takes a response and an answer and returns whether the response is right."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    answer_key: str = "answer"
    """Column of the answer."""
    teacher_key: str | None = None
    """Column that names the teacher of a prompt (a key of `teachers`, or "teacher"); null: one
    teacher for all."""
    chat_template: bool = False
    """Wrap each prompt as one user message through the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are counted and skipped."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Largest share of a file's rows that may be unusable: malformed, an empty prompt, of a wrong
    type, or without an answer where rewards or an evaluation need one. They are counted and skipped
    before anything starts; above this share the file is refused. 0 refuses the first. Rows that
    are only too long do not count. Raising it trains on what is left of a damaged file."""
    shuffle: bool = True
    """A new order every epoch, by run.seed; otherwise file order."""

    @model_validator(mode="after")
    def _columns_differ(self) -> DataConfig:
        columns = [self.prompt_key, self.answer_key, self.teacher_key]
        if any(columns.count(name) > 1 for name in columns if name is not None):
            raise ValueError(
                "prompt_key, answer_key and teacher_key must name different columns, got "
                f"{shown(self.prompt_key)}, {shown(self.answer_key)}, {shown(self.teacher_key)}"
            )
        return self


class ServerConfig(Section):
    """One role's SGLang servers."""

    model: FilePath
    """Hugging Face checkpoint directory."""
    servers: Processes = 1
    """Servers to start."""
    urls: Texts = ()
    """Servers started elsewhere; then none are started here."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable that holds the servers' API key, sent with every request and
    given to servers started by `opd serve`; null: servers that `opd run` starts get a random key
    for that run, others are asked without one."""
    host: Host = "127.0.0.1"
    """Name or IPv4 address on which they listen."""
    base_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Server i listens on base_port + i; 0 picks free ports."""
    dtype: Dtype = "bfloat16"
    """Weights and KV in the server."""
    tp: Processes = 1
    """Tensor-parallel ranks of a server."""
    ep: Processes = 1
    """How many of them split the experts."""
    context_length: PositiveInt | None = None
    """Tokens of prompt and response; null takes the model's."""
    max_total_tokens: PositiveInt | None = None
    """KV pool in tokens; null lets a GPU use mem_fraction_static and a CPU take 65536."""
    max_running_requests: PositiveInt = 64
    """Requests a server batches at once."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """GPU memory share for weights and KV."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB: `opd check` refuses weights and KV that cannot fit; null: it only
    says what is needed."""
    startup_timeout_s: Seconds = 600.0
    """Longest wait for a server to answer."""
    request_timeout_s: Seconds = 600.0
    """Longest wait for one reply."""
    extra_args: Texts = ()
    """Appended to the server's command line, one item an argument."""

    @field_validator("urls")
    @classmethod
    def _whole_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Normalised: one server must have one name, for requests are counted by it."""
        named = tuple(url.strip().rstrip("/") for url in urls)
        for url in named:
            if not is_server_url(url):
                shown = (
                    url
                    if "@" not in url
                    else f"one with user or password: {url.rpartition('@')[2]}"
                )
                raise ValueError(f"each url must be http(s)://HOST:PORT, got {shown!r}")
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
    """How the student samples: the behaviour distribution, whose exact log-probs are cached."""

    temperature: Temperature = 1.0
    """Divides the logits, in sampling and in the student's log-probs in the loss. Below 1 sharpens
    what is sampled, and loses diversity; 0.01 is the least that float32 logits hold."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1 the sampler does not cover the student: refused wherever the loss has a ratio to the
    sampler, and the learner-sampler mismatch is not measured."""
    max_new_tokens: PositiveInt = 1024
    """Response limit."""
    concurrency: Concurrency = 64
    """Rollouts in flight over the fleet; permits bound it too."""
    group_size: PositiveInt = 1
    """G, rollouts of each prompt; objectives that compare responses need at least 2."""
    attempts: PositiveInt = 3
    """Tries per rollout while connections to servers break; then the run ends. Each is a new
    sample, counted in rollouts_restarted."""


class ScoringConfig(Section):
    """How rollouts are sent to the teacher."""

    concurrency: Concurrency = 32
    """Scoring requests in flight over the teachers."""
    attempts: PositiveInt = 3
    """Tries per sample before it is dropped, and per request of the guard before the run ends.
    Raising it outlasts longer outages and overload, and waits longer for a teacher that is gone."""
    temperature: Temperature = 1.0
    """Divides the teacher's logits: q is softmax(logits / temperature). Raising it flattens q."""
    guard: Guard = "refuse"
    """What happens to a teacher that answers nonsense: another tokenizer than the student's, scores
    that differ from the log-probs it samples with, scores that are constant or those of a uniform
    distribution. refuse: not started, and stopped by guard_stop_after; warn: told in one line; off:
    not looked at. The look before the first update costs each server 8 short responses. A model
    with random weights may be nearly uniform: `warn` or `off` let it teach."""
    guard_stop_after: NonNegativeInt = 3
    """Updates in a row with nonsense from a teacher after which the run stops, with guard refuse;
    0: never, only the alarm is given."""


class BufferConfig(Section):
    """Batches, and how stale they may be (AsyncOPD App. G)."""

    batch_size: PositiveInt = 64
    """B, samples per learner update."""
    max_staleness: NonNegativeInt = 1
    """tau in versions, enforced by (tau + 1) B permits; 0 is synchronous."""
    hold_batches: NonNegativeInt = 0
    """Batches that must lie scored behind the one trained on (AsyncOPD App. B): the staleness of a
    study, at most max_staleness; 0 trains as soon as a batch is there."""

    @property
    def permits(self) -> int:
        """(tau + 1) B."""
        return (self.max_staleness + 1) * self.batch_size


class WeightSyncConfig(Section):
    """How new weights reach the student servers."""

    bucket_bytes: ByteCount = 512 * 2**20
    """Largest flattened bucket."""
    timeout_s: Seconds = 300.0
    """Longest wait of any step of a publication; then the run fails."""
    host: Host = "127.0.0.1"
    """Name or IPv4 address on which the learner's rank 0 listens for the servers' ranks."""
    round_to: Literal["int8", "fp8"] | None = None
    """Publish weight matrices rounded to this format (a row's largest magnitude sets its scale):
    a sampler of low precision, to study learner-sampler mismatch."""
    verify_first: bool = True
    """After a run's first publication compare digests of every slice in the fleet with the
    learner's export."""


class EvaluationConfig(Section):
    """avg@k (AsyncOPD Eq. 14) on held-out problems."""

    problems: NonNegativeInt = 64
    """The first ones of data.heldout; 0 = no evaluation."""
    samples: PositiveInt = 4
    """k, responses a problem."""
    temperature: Literal[0] | Temperature = 1.0
    """Divides the logits of evaluated samples; 0 = greedy."""
    max_new_tokens: PositiveInt | None = None
    """Null takes rollout.max_new_tokens."""
    before: bool = True
    """Student and teacher before a run."""
    after: bool = True
    """Student after a run."""

    @property
    def runs(self) -> bool:
        """Whether `opd run` evaluates at all."""
        return self.problems > 0 and (self.before or self.after)


class CheckpointConfig(Section):
    """What is kept of the student, and of the whole run."""

    every: NonNegativeInt = 0
    """Updates between checkpoints that `--resume` goes on from; 0: not by count. Lower loses less
    work in a crash and writes more."""
    every_minutes: NonNegativeFloat = 10.0
    """Minutes after which, at the end of an update, one is written too; 0: not by time. Both 0: a
    crash loses everything. Every learner rank must see run.dir."""
    keep_last: PositiveInt = 2
    """Newest of them to keep."""
    keep_every: NonNegativeInt = 0
    """Besides, keep those after a multiple of so many updates; 0: none."""
    async_save: bool = True
    """Training waits only while the state is copied to host memory, not while it is written."""
    export_hf: bool = True
    """Write the final student as a Hugging Face checkpoint into the run directory."""

    @property
    def writes(self) -> bool:
        """Whether checkpoints to go on from are written."""
        return self.every > 0 or self.every_minutes > 0


class MetricsConfig(Section):
    """What a run records besides metrics.jsonl and summary.json."""

    tensorboard: bool = True
    """Event files."""
    trace: bool = True
    """Time line for Perfetto."""
    progress: bool = True
    """Live panel, or a line per update."""
    signal_patience: PositiveInt = 3
    """Updates in a row that teach nothing (all rewards of every group equal, or a gradient of
    exactly 0) before the terminal says so. Higher is quieter and later."""


def is_server_url(url: str) -> bool:
    """Whether `url` is http(s)://HOST[:PORT][/prefix] and nothing more."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError when it is no port
    except ValueError:
        return False
    spaced = any(character.isspace() for character in url)
    # a password in it would be in logs and summary; keys come from api_key_env
    plain = not (parts.query or parts.fragment or spaced or "@" in parts.netloc)
    host = parts.netloc.startswith("[") or is_host(parts.hostname or "")
    return parts.scheme in ("http", "https") and host and plain
