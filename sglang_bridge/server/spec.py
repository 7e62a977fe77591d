"""Says what one SGLang server is started with. It needs no SGLang, torch or processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_bridge.gpus import let_see
from sglang_bridge.listening import keep_groups_on
from sglang_bridge.toolkit import toolkit
from sglang_bridge.weights.formats import Format

ENABLED_VARIABLE = "SGLANG_BRIDGE"
"""1: let the plugin change SGLang in this process and those below it. `python -m
sglang_bridge.server` sets it; SGLang's own launch command is left alone without it."""
SEED_VARIABLE = "SGLANG_BRIDGE_SEED"
PARENT_VARIABLE = "SGLANG_BRIDGE_PARENT"
# never on a command line: every user of a machine reads those
API_KEY_VARIABLE = "SGLANG_BRIDGE_API_KEY"
FILES_VARIABLE = "SGLANG_BRIDGE_FILES"
NONCE_VARIABLE = "SGLANG_BRIDGE_NONCE"
QUANTIZATION_VARIABLE = "SGLANG_BRIDGE_QUANTIZATION"
GROUP_TIMEOUT_VARIABLE = "SGLANG_BRIDGE_GROUP_TIMEOUT_S"
WEIGHTS_DIR_VARIABLE = "SGLANG_BRIDGE_WEIGHTS_DIR"
GATES_VARIABLE = "SGLANG_BRIDGE_ROUTING_WEIGHTS"  # 1: keep them
NUM_IDS_VARIABLE = "SGLANG_BRIDGE_NUM_IDS"
PLAIN_VARIABLE = "SGLANG_BRIDGE_PLAIN_WEIGHTS"  # 1: de-quantise the checkpoint on GPUs too
MODEL_KEY_VARIABLE = "SGLANG_BRIDGE_MODEL_KEY"
PRELOADED_VARIABLE = "SGLANG_BRIDGE_PRELOADED"
"""PID:DESCRIPTOR: the process of this id has a preloaded process below it, behind that socket."""
READ_LATE = frozenset(
    {
        API_KEY_VARIABLE,
        FILES_VARIABLE,
        GROUP_TIMEOUT_VARIABLE,
        MODEL_KEY_VARIABLE,
        NONCE_VARIABLE,
        NUM_IDS_VARIABLE,
        PARENT_VARIABLE,
        PLAIN_VARIABLE,
        PRELOADED_VARIABLE,
        QUANTIZATION_VARIABLE,
        SEED_VARIABLE,
        WEIGHTS_DIR_VARIABLE,
    }
)
"""What a server reads once it runs, and nothing while it is imported."""
REFUSED = "sglang_bridge: refused: "
"""Start of the line of a server's log that says why it cannot serve its model."""
MOE_FLAGS = ("--moe-runner-backend", "--moe-a2a-backend")
MEMORY_FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
# No process of a server loads a tokenizer then: 0.24 GB less for three processes and 49k tokens. It
# knows the end tokens of the model's configuration alone; requests name the tokenizer's.
TOKENLESS_FLAG = "--skip-tokenizer-init"
# An idle connection is the client's to close (http.KEEPALIVE_S): a server that closes one just as a
# request enters it fails that request. Its own default of 5 s does so on a machine that stalls.
KEEP_ALIVE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Says how one server is started.

    role: names the log and, on GPU, keeps logits in float32 for both; a teacher's server has no
    tokenizer. port: 0 is not accepted, see
    `free_port`. tp, ep: tensor-parallel ranks and how many of them split the experts.
    context_length: None takes the model's. max_total_tokens: KV pool in tokens; None lets a GPU use
    mem_fraction_static and a CPU take 65536. threads: OpenMP threads of each rank (CPU).
    seed: of SGLang's sampler and of the draws. group_timeout_s: how long a rank of the server waits
    for a silent peer of a weight-update group. routed_experts: keep which experts each token
    visited, 4 bytes a token of the KV pool, layer and expert; MoE models only. routed_gates: keep
    their weights too, another 4 bytes. deterministic: what a request gets depends on its seed and
    the weights alone, not on what is batched beside it (but truncated requests, top_p < 1, are for
    times of their own). quantization: how matrices are held; None: as they are
    (sglang_bridge/server/quantised.py). weights_dir: the one directory below which it reads new
    weights; None: it reads none from disk. shares_memory: it can give up GPU memory while it is
    idle, and keeps its weights in host memory then (server/memory.py). follows: a teacher's server
    that is sent new weights, as a student's is. gpus: what CUDA calls the
    GPUs that it sees, one for each of its tp ranks (gpus.py); None: those that its parent sees.
    interface: on which its groups listen; None: that of host. num_ids: ids that have a probability,
    where further rows of the vocabulary are padding; None: every row. model_key: what messages call
    the setting that names the model. extra_args: appended to the command line.
    """

    model_path: str
    role: Literal["student", "teacher"]
    port: int
    host: str = "127.0.0.1"
    dtype: str = "bfloat16"
    tp: int = 1
    ep: int = 1
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int = 64
    mem_fraction_static: float = 0.8
    seed: int = 1234
    threads: int = 1
    group_timeout_s: float = 300.0
    routed_experts: bool = False
    routed_gates: bool = False
    deterministic: bool = False
    quantization: Format | None = None
    weights_dir: str | None = None
    shares_memory: bool = False
    follows: bool = False
    gpus: tuple[str, ...] | None = None
    interface: str | None = None
    num_ids: int | None = None
    model_key: str = "--model-path"
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be in 1..65535, got {self.port}")
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ValueError(f"ep must divide tp, got ep={self.ep}, tp={self.tp}")
        if self.gpus is not None and len(self.gpus) != self.tp:
            raise ValueError(f"gpus must be tp = {self.tp} GPUs, got {len(self.gpus)}")
        if self.routed_gates and not self.routed_experts:
            raise ValueError("routed_gates needs routed_experts, got routed_experts=False")

    @property
    def gets_weights(self) -> bool:
        """Returns whether weight syncs write its weights, which have to lie as they are sent."""
        return self.role == "student" or self.follows

    @property
    def url(self) -> str:
        """Returns where clients reach the server."""
        return f"http://{self.host}:{self.port}"


def server_command(spec: ServerSpec) -> list[str]:
    """Returns the command line; `python -m sglang_bridge.server` adds what the device needs."""
    command = [sys.executable, "-m", "sglang_bridge.server"]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--dtype", spec.dtype, "--random-seed", str(spec.seed), "--weight-version", "0"]
    command += ["--max-running-requests", str(spec.max_running_requests)]
    command += ["--mem-fraction-static", str(spec.mem_fraction_static)]
    if spec.tp > 1:
        command += ["--tp-size", str(spec.tp)]
    if spec.ep > 1:
        command += ["--ep-size", str(spec.ep)]
    if spec.context_length is not None:
        command += ["--context-length", str(spec.context_length)]
    if spec.max_total_tokens is not None:
        command += ["--max-total-tokens", str(spec.max_total_tokens)]
    chosen = any(_flag(word) in MOE_FLAGS for word in spec.extra_args)
    if spec.quantization is not None or (spec.gets_weights and not chosen):
        # of what SGLang might choose itself (on Blackwell), some lays experts out anew, and weight
        # syncs could not write them; a CPU ignores it
        command += ["--moe-runner-backend", "triton"]
    if spec.role == "teacher" and TOKENLESS_FLAG not in spec.extra_args:
        command += [TOKENLESS_FLAG]  # it is asked for scores of ids alone
    if spec.routed_experts:
        command += ["--enable-return-routed-experts"]
    if spec.deterministic:
        command += ["--enable-deterministic-inference"]
    if spec.shares_memory:
        command += MEMORY_FLAGS
    return [*command, *spec.extra_args]


def _flag(word: str) -> str:
    """Returns a word's option as it is written in MOE_FLAGS, where it is one."""
    return word.partition("=")[0].replace("_", "-")


def server_env(
    spec: ServerSpec,
    base: Mapping[str, str] | None = None,
    *,
    api_key: str | None = None,
    files: str | None = None,
    nonce: str | None = None,
) -> dict[str, str]:
    """Returns the environment: `base` (default: this process's) and what the server needs.

    api_key: what every request must bring. files: a directory for the server's own files.
    nonce: by which it proves that it is the one that was started.
    """
    env = dict(os.environ if base is None else base)
    given = {
        API_KEY_VARIABLE: api_key,
        FILES_VARIABLE: files,
        NONCE_VARIABLE: nonce,
        QUANTIZATION_VARIABLE: spec.quantization,
        WEIGHTS_DIR_VARIABLE: spec.weights_dir,
        GATES_VARIABLE: "1" if spec.routed_gates else None,
        MODEL_KEY_VARIABLE: spec.model_key,
        PLAIN_VARIABLE: "1" if spec.gets_weights or spec.quantization else None,
        NUM_IDS_VARIABLE: None if spec.num_ids is None else str(spec.num_ids),
    }
    for name, value in given.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    if spec.gpus is not None:
        let_see(env, spec.gpus)
    compiles = toolkit(env)
    if compiles is not None:
        env.setdefault("CUDA_HOME", str(compiles))
        # SGLang compiles by ninja, which lies beside this interpreter
        programs = (env.get("PATH", os.defpath), str(Path(sys.executable).parent))
        env["PATH"] = os.pathsep.join(programs)
    keep_groups_on(spec.host, env, spec.interface)
    env["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.threads > 1:
        # A team that spins at the end of each product waits for members that have lost their core
        # to another process: twelve times slower where a teacher works on the same two cores.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env["HF_HUB_OFFLINE"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    env[SEED_VARIABLE] = str(spec.seed)
    env[GROUP_TIMEOUT_VARIABLE] = str(spec.group_timeout_s)
    env[PARENT_VARIABLE] = str(os.getpid())
    env.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_S))
    # Its engine for AVX-512 machines with sgl_kernel; ours is the platform plugin.
    env.pop("SGLANG_USE_CPU_ENGINE", None)
    if spec.tp > 1:
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_by_rank(spec.tp, spec.threads))
    return env


def _cores_by_rank(tp: int, threads: int) -> str:
    """Returns `0|1`: each rank's cores, reused from the first when the machine has too few."""
    cores = sorted(os.sched_getaffinity(0))
    groups = []
    for rank in range(tp):
        chosen = {cores[(rank * threads + i) % len(cores)] for i in range(threads)}
        groups.append(",".join(str(core) for core in sorted(chosen)))
    return "|".join(groups)
