"""Defines the section of one role's SGLang servers: the student's, or a teacher's."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from megatron_opd.config.learner import Dtype
from megatron_opd.config.section import (
    FilePath,
    GpuList,
    Host,
    PositiveFloat,
    PositiveInt,
    Processes,
    Seconds,
    Section,
    Texts,
    is_host,
)
from megatron_opd.config.wording import shown
from sglang_bridge.listening import is_loopback
from sglang_bridge.weights.formats import Format


class ServerConfig(Section):
    """Describes the SGLang servers of one role: the student (sampler) or a teacher."""

    model: FilePath
    """Hugging Face checkpoint directory that the servers load."""
    servers: Processes = 1
    """Number of servers to start here; each holds the whole model. More servers answer more
    requests at once and take that many times the memory."""
    urls: Texts = ()
    """Base URLs of servers that were started elsewhere, http(s)://HOST:PORT; then none are started
    here. A student's are one run's at a time, a teacher's may be shared by many runs unless it
    follows the student (teacher.source)."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of the environment variable that holds the servers' API key, sent with every request and
    given to servers started by `opd serve`; null: servers that `opd run` starts get a random key
    for that run, others are asked without one, beyond this machine only with
    security.insecure."""
    host: Host = "127.0.0.1"
    """Host name or IPv4 address on which the servers listen. Any address but 127.0.0.1 lets other
    machines reach them: `opd serve` then needs api_key_env, or security.insecure."""
    base_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """First port: server i listens on base_port + i; 0 picks free ports. A port that something else
    has, such as another run's server, ends the start."""
    dtype: Dtype = "bfloat16"
    """Number format of weights and KV cache in the servers. float32 takes twice the memory of
    bfloat16 and is slower, and brings sampler and learner closer."""
    quantization: Format | None = None
    """Holds the matrices of attention, MLP and experts as numbers of one byte (int8, or fp8: e4m3)
    and a float32 scale for each row, which halves the memory that they take in bfloat16. All else
    stays in dtype, and so does the whole learner. Checkpoints are quantised while they are loaded,
    new weights by the learner (weight_sync.type: shards). Widens the gap between learner and
    sampler; on a CPU it is slow, because every product de-quantises its matrix. null: not
    quantised."""
    min_servers: Processes = 1
    """Number of servers without which the run ends, where those that are being started again count
    too. Until then it goes on without servers that are lost, more slowly. Not with
    run.deterministic, where every server counts."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often within an hour one server is started again after it was lost, with growing waits,
    from 1 s on; it takes part from the next weight sync on. A server at `urls` is not started but
    awaited, for startup_timeout_s. 0: never. Raising it outlasts servers that fail again and
    again."""
    tp: Processes = 1
    """Tensor-parallel ranks per server, each a process (on a GPU node one GPU each). More ranks
    hold larger models and communicate more."""
    gpus: GpuList | None = None
    """GPUs of this node for the servers started here, such as [0, 1, 2, 3]: the first tp of them
    for server 0, the next tp for server 1 and so on, servers * tp in all. They are counted from 0,
    within CUDA_VISIBLE_DEVICES where that is set. null: laid out by itself on what is free, as many
    as servers and tp need; `opd check` shows where. Not with urls, whose servers are elsewhere."""
    ep: Processes = 1
    """Expert-parallel ranks per server: how many of its tp ranks split the experts of an MoE model.
    Must divide tp."""
    context_length: PositiveInt | None = None
    """Largest number of tokens of prompt and response together; null takes the model's own. Raising
    it allows longer samples, each of which needs more of the KV cache."""
    max_total_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens; null derives it from mem_fraction_static on a GPU and takes
    65536 on a CPU. Raising it keeps more requests in flight and takes more memory."""
    max_running_requests: PositiveInt = 64
    """Largest number of requests that one server batches at once; others wait in its queue. Raising
    it increases throughput and memory, and slows each single request."""
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of a GPU's memory for weights and KV cache together. Raising it leaves less for
    activations; too high ends in an out-of-memory error."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU in GiB: `opd check` rejects weights and KV cache that cannot fit; null: it
    only prints what is needed."""
    startup_timeout_s: Seconds = 600.0
    """Longest wait in seconds for a started server to answer, counted anew while it compiles
    kernels, as at its first start on a GPU; then the run ends with an error. Raise it for large
    models on slow disks."""
    request_timeout_s: Seconds = 300.0
    """Longest time in seconds that a request may make no progress while its server runs it; then it
    is cancelled and sent anew. The server is asked: a response that grows is never cut off, and
    neither its queue nor a pause for a weight sync counts. A server that says nothing for so long
    is lost. Raising it notices later what hangs."""
    threads: Processes = 1
    """CPU threads of each rank of a server. Those of all servers and of the learner together should
    be no more than the cores, unless they work in turn (schedule.time_shared). On a GPU it matters
    little."""
    extra_args: Texts = ()
    """Further arguments for the server's command line, one list item per argument, such as
    ["--attention-backend", "triton"]. What would change the served model, its tokens or its
    sampling is refused."""

    @field_validator("urls")
    @classmethod
    def _whole_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Normalise the URLs, so that one server has one name by which requests are counted."""
        named = tuple(url.strip().rstrip("/") for url in urls)
        for url in named:
            if not is_server_url(url):
                secret = "one with user or password: " if "@" in url else ""
                got = shown(secret + url.rpartition("@")[2])
                raise ValueError(f"each url must be http(s)://HOST:PORT, got {got}")
            if named.count(url) > 1:
                raise ValueError(f"each url must be given once, got {shown(url)} twice")
        return named

    @model_validator(mode="after")
    def _ep_divides_tp(self) -> ServerConfig:
        if self.tp % self.ep:
            raise ValueError(f"ep must divide tp, got ep={self.ep}, tp={self.tp}")
        return self

    @model_validator(mode="after")
    def _gpus_are_all(self) -> ServerConfig:
        if self.gpus is None:
            return self
        if self.urls:
            raise ValueError(
                "gpus must be null with urls, whose servers are started elsewhere, got "
                f"{list(self.gpus)}; give it to opd serve there"
            )
        if len(self.gpus) != self.servers * self.tp:
            raise ValueError(
                f"gpus must name servers * tp = {self.servers} * {self.tp} = "
                f"{self.servers * self.tp} GPUs, got {len(self.gpus)}: {list(self.gpus)}"
            )
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
    def speaks_bridge(self) -> bool:
        """Tell whether the servers have the plugin; a student's always do."""
        return True

    @property
    def ports(self) -> range:
        """Returns the fixed ports of the servers started here; empty when free ports are picked."""
        count = self.servers if self.base_port and not self.urls else 0
        return range(self.base_port, self.base_port + count)


def is_local_url(url: str) -> bool:
    """Return whether only this machine reaches a server's url."""
    return is_loopback(urlsplit(url).hostname or "")


def is_server_url(url: str) -> bool:
    """Return whether `url` is http(s)://HOST[:PORT][/prefix] and nothing more."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError when it is not a port
    except ValueError:
        return False
    spaced = any(character.isspace() for character in url)
    # a password in it would show in logs and summary; keys come from api_key_env
    plain = not (parts.query or parts.fragment or spaced or "@" in parts.netloc)
    host = parts.netloc.startswith("[") or is_host(parts.hostname or "")
    return parts.scheme in ("http", "https") and host and plain
