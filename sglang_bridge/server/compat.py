"""Touches SGLang's internals, in this one place, for exactly one version of it.

SGLang's plugins fail open: a hook that does not fit is logged and skipped. So this module is the
one to change for a new version, each of its functions has a test, and a server whose version or
hooks do not fit refuses to start.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed

from sglang_bridge.listening import bound_socket
from sglang_bridge.weights.lanes import forget_lanes

SUPPORTED = "0.5.23"
DEFAULT_SEED = 42  # SamplingBatchInfo.from_schedule_batch: of a request that names none

AFTER_RUNNER_INIT = "sglang.srt.model_executor.model_runner.ModelRunner.__init__"
STREAMER_CLASS = "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
INPUT_LOGPROBS = "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward"
CHECK_WEIGHTS = "sglang.srt.utils.weight_checker.WeightChecker.handle"
WHILE_PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
ON_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
NATIVE_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
BATCH_INVARIANT = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
LOAD_MODEL = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"
LOAD_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"
QUANT_CONFIG = "sglang.srt.model_loader.loader._get_quantization_config"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
SAMPLE = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
# of servers that keep gates, alone
EXPERT_RECORD = "sglang.srt.state_capturer.base.BaseTopkCapturer.__init__"
EXPERT_CHOICE = "sglang.srt.layers.moe.topk._post_process_topk_ids"
EXPERT_CAPTURE = "sglang.srt.layers.moe.topk.capture_routed_experts_if_allowed"

INIT_GROUP = (
    "sglang.srt.model_executor.model_runner_components.weight_updater."
    "WeightUpdater.init_weights_update_group"
)

TARGETS = (
    AFTER_RUNNER_INIT,
    STREAMER_CLASS,
    WHILE_PAUSED,
    ON_IDLE,
    FORWARD,
    INPUT_LOGPROBS,
    CHECK_WEIGHTS,
    VALIDATE,
    NATIVE_EXPERTS,
    BATCH_INVARIANT,
    LOGITS,
    SAMPLE,
    QUANT_CONFIG,
    LOAD_MODEL,
    LOAD_WEIGHTS,
    INIT_GROUP,
)
GATE_TARGETS = (EXPERT_RECORD, EXPERT_CHOICE, EXPERT_CAPTURE)


def require_supported_version() -> None:
    """Raises RuntimeError unless the installed SGLang is the supported one."""
    installed = version("sglang")
    if installed != SUPPORTED:
        raise RuntimeError(
            f"sglang_bridge supports sglang {SUPPORTED}, found {installed}: "
            f"pip install --no-deps sglang=={SUPPORTED}"
        )


def require_hooks_in_place(targets: Sequence[str] = TARGETS) -> None:
    """Raises RuntimeError unless these hooks were applied; call after SGLang's load_plugins()."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            "the sglang_bridge plugin is not active (is the package installed, with its entry "
            f"points?); not hooked: {', '.join(missing)}"
        )


def hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Registers a hook of a kind of HookType: "before", "after", "around", "replace"."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType(kind))


def fork_workers() -> None:
    """Makes schedulers and detokenizer forks of this process; call before SGLang's run_server().

    SGLang spawns interpreters that import everything anew: a third of the CPU time of a start
    remains, and half of the memory. Not where CUDA is, which no fork survives. They are started
    before SGLang has threads or sockets in this process; nothing here may compute beforehand, for
    the threads of a used OpenMP pool are lost in a fork.
    """
    from sglang.srt.entrypoints import engine

    settle = engine._set_envs_and_config

    def settle_and_fork(*args: Any, **kwargs: Any) -> None:
        settle(*args, **kwargs)  # sets "spawn"
        # a collection writes to the header of every object that it may free: the forks would soon
        # have a copy each of what was imported, 0.35 GB more for a server
        gc.collect()
        gc.freeze()
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = settle_and_fork


def hide_keys() -> None:
    """Keeps API keys out of logs and /server_info; call before SGLang's run_server().

    SGLang writes its resolved arguments to the log when it starts, keys included.
    """
    from sglang.srt.server_args import ServerArgs

    resolved = ServerArgs.resolved_dict

    def without_keys(self: Any) -> dict[str, Any]:
        shown = resolved(self)
        hidden = {name: "hidden" for name in ("api_key", "admin_api_key") if shown.get(name)}
        return shown | hidden

    ServerArgs.resolved_dict = without_keys


def keep_files_in(directory: str) -> None:
    """Keeps this server's sockets in `directory`; call before SGLang's run_server().

    Its shared memory is named after the directory. SGLang removes neither when it is killed.
    """
    from sglang.srt.server_args import PortArgs

    make = PortArgs.init_new

    def make_inside(*args: Any, **kwargs: Any) -> Any:
        usual, tempfile.tempdir = tempfile.tempdir, directory
        try:
            ports = make(*args, **kwargs)
        finally:
            tempfile.tempdir = usual
        ports.instance_id = os.path.basename(directory)
        return ports

    PortArgs.init_new = staticmethod(make_inside)


def bind_stores() -> None:
    """Makes torch's stores listen on the host they are named by, and not on every interface.

    It covers rendezvous by tcp:// and env://, and every store that SGLang makes itself.
    """
    # by name: the package holds a function called as the module
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = BoundStore
    setattr(torch.distributed, "TCPStore", BoundStore)  # noqa: B010  (its stubs do not export it)


class BoundStore(torch.distributed.TCPStore):  # pyright: ignore[reportPrivateImportUsage]
    """Binds a TCPStore's server to `host_name`; without one given, torch binds to all."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        **options: Any,
    ) -> None:
        if is_master and options.get("master_listen_fd") is None:
            with bound_socket(host_name, port) as listener:
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, **options)


def add_route(
    path: str,
    media_type: str,
    arguments_of: Callable[[bytes], dict[str, Any]],
    encode: Callable[[dict[str, Any]], bytes],
    most_bytes: int,
) -> None:
    """Adds a route that generates; call in the process that serves HTTP, before run_server().

    arguments_of: makes those of GenerateReqInput of a body of at most `most_bytes`; a ValueError is
    answered with 400. Keys are checked as for every route of SGLang's.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.responses import Response

    async def generate(request: Any) -> Any:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                return Response(f"a body of more than {most_bytes} bytes", status_code=413)
        try:
            asked = GenerateReqInput(**arguments_of(bytes(body)))
            manager: Any = http_server.get_global_state().tokenizer_manager
            answer = await anext(manager.generate_request(asked, request))
        except ValueError as error:
            return http_server._create_error_response(error)
        return Response(encode(answer), media_type=media_type)

    add_own_route(path, generate, "POST")


def add_own_route(path: str, answer: Callable[[Any], Awaitable[Any]], method: str) -> None:
    """Adds a route; call in the process that serves HTTP, before run_server()."""
    from sglang.srt.entrypoints import http_server

    http_server.app.router.add_route(path, answer, methods=[method])


def reply(text: str, status: int) -> Any:
    """Returns an answer of plain text."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, status_code=status)


# ---------------------------------------------------------------- process-wide state


def is_output_rank() -> bool:
    """Returns whether this process holds the whole batch's outputs: attention-TP rank 0."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank == 0


def weight_version() -> str:
    """Returns the version label of the weights this process computes with now."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


def is_deterministic() -> bool:
    """Returns whether this server was started with --enable-deterministic-inference."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def allow_deterministic_attention(backend: str) -> None:
    """Lets servers with this attention backend be deterministic, without a prefix cache.

    What a cache holds may have been computed by a decode step, which rounds otherwise than the
    prefill it stands for.
    """
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices([backend])


def tp_rank() -> int:
    """Returns this process's tensor-parallel rank in its server."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def model_path() -> str:
    """Returns the checkpoint's directory of this server."""
    from sglang.srt.runtime_context import get_server_args

    args: Any = get_server_args()
    return args.model_path


def gather_from_ranks(value: Any) -> list[Any]:
    """Returns what every rank of this server gives, on all of them; each must call it."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


# ---------------------------------------------------------------- requests and batches


def custom_params(req: Any) -> dict[str, Any]:
    """Returns the request's custom_params; empty when it has none."""
    params = req.sampling_params.custom_params
    return params if isinstance(params, dict) else {}


def seed_of(req: Any) -> int:
    """Returns the seed of a request's random numbers, where the server is deterministic."""
    seed = req.sampling_params.sampling_seed
    return DEFAULT_SEED if seed is None else seed


def batch_seeds(batch: Any) -> list[int] | None:
    """Lists the seed of each request's path; None where SGLang is to sample as it always does.

    None: no request has one, nothing is sampled, a speculative decoder samples, or the server is
    deterministic, where SGLang has them. Who asked for none, beside one who did, gets one of
    the request's name and the server's random seed, on which all ranks agree.
    """
    given = [req.sampling_params.sampling_seed for req in batch.reqs]
    info = batch.sampling_info
    if info is None or info.is_all_greedy or is_deterministic() or batch.is_prefill_only:
        return None
    if not batch.spec_algorithm.is_none() or all(seed is None for seed in given):
        return None
    return [
        record_of(req, "_bridge_seed", lambda r=req: _seed_of_name(r.rid)) if seed is None else seed
        for req, seed in zip(batch.reqs, given, strict=True)
    ]


def _seed_of_name(rid: str) -> int:
    from sglang.srt.runtime_context import get_server_args

    args: Any = get_server_args()
    name = f"{args.random_seed}:{rid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


@contextmanager
def sampled_by(batch: Any, seeds: Sequence[int] | None) -> Iterator[None]:
    """Lets a forward pass of `batch` sample by these seeds; its own sampling info stays as it is.

    The pass keeps what it is given here, also for sampling that is postponed.
    """
    info = batch.sampling_info
    if seeds is not None:
        on_gpu = torch.device(info.device).type == "cuda"
        seed_B = torch.tensor(seeds, dtype=torch.int64, pin_memory=on_gpu)
        seed_B = seed_B.to(info.device, non_blocking=True)
        batch.sampling_info = dataclasses.replace(info, sampling_seed=seed_B)
    try:
        yield
    finally:
        batch.sampling_info = info


def without_seeds(info: Any) -> Any:
    """Returns sampling info with which SGLang samples by its own generator."""
    return dataclasses.replace(info, sampling_seed=None)


def gumbel_choice(
    logp_BV: torch.Tensor, seed_B: torch.Tensor, position_B: torch.Tensor
) -> torch.Tensor:
    """Returns int64 [B]: an id of each row, by SGLang's kernel, which needs CUDA."""
    from sglang.srt.layers.sampler import multinomial_with_seed

    return multinomial_with_seed(logp_BV, seed_B, position_B)[:, 0]


def next_positions(batch: Any) -> list[int]:
    """Lists the position of the token that each request of a batch, not computed yet, predicts."""
    return batch.seq_lens_cpu.tolist()


def record_of(req: Any, name: str, make: Callable[[], Any]) -> Any:
    """Returns our object kept on a request under `name`, made on first use.

    It survives retraction.
    """
    record = req.__dict__.get(name)
    if record is None:
        record = make()
        setattr(req, name, record)
    return record


def find_record(req: Any, name: str) -> Any | None:
    """Returns the object kept by `record_of`, or None."""
    return req.__dict__.get(name)


def experts_of(model: torch.nn.Module, config: Any) -> tuple[tuple[int, ...], int]:
    """Returns (layers that hold experts, experts of each). config: the runner's ModelConfig."""
    from sglang.srt.layers.moe.topk import TopK

    layers = sorted({m.layer_id for m in model.modules() if isinstance(m, TopK)})
    text = config.hf_text_config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return tuple(layers), next(getattr(text, name) for name in names if hasattr(text, name))


def keeps_experts(manager: Any) -> bool:
    """Returns whether the server was started to keep routed experts."""
    return bool(manager.server_args.enable_return_routed_experts)


def input_slots(batch: Any, wanted: Sequence[bool]) -> tuple[torch.Tensor, list[slice | None]]:
    """Returns KV slots of a batch about to be computed, and which are those of each wanted request.

    Of a prefill: all its inputs up to the last one, a cached prefix included. Of a decode step: its
    one input. int64, on the device, a copy.
    """
    if batch.forward_mode.is_decode():
        slots = batch.out_cache_loc[: len(wanted)].to(torch.int64, copy=True)
        return slots, [slice(i, i + 1) if wants else None for i, wants in enumerate(wanted)]
    table, parts, places = batch.req_to_token_pool.req_to_token, [], []
    stop = 0
    for req, prefix, extend, wants in zip(
        batch.reqs, batch.prefix_lens, batch.extend_lens, wanted, strict=True
    ):
        if wants:
            parts.append(table[req.kv.req_pool_idx][: prefix + extend])
            stop += prefix + extend
        places.append(slice(stop - prefix - extend, stop) if wants else None)
    return torch.cat(parts).to(torch.int64), places


def routed_experts(slots: torch.Tensor) -> Any:
    """Returns what SGLang stored for these KV slots (host): int32 [slots, all layers, experts]."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer: Any = get_global_experts_capturer()
    return capturer.host_cache.buffer[slots].numpy()


def requests_of(scheduler: Any) -> tuple[dict[str, int], list[str]]:
    """Returns the requests that run, with the tokens each has, and the names of those in line."""
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch is not None]
    running = [req for batch in batches for req in batch.reqs if not req.finished()]
    if scheduler.chunked_req is not None:
        running.append(scheduler.chunked_req)
    waiting = [req.rid for req in scheduler.waiting_queue]
    return {req.rid: len(req.output_ids) for req in running}, waiting


def ends_of(scheduler: Any) -> dict[str, list[int] | None]:
    """Returns the ids at which this rank ends every request, as Req is given and reads them."""
    tokenizer = scheduler.tokenizer
    found: dict[str, list[int] | None] = {
        "model": sorted(scheduler.model_config.hf_eos_token_id),
        "tokenizer": None,
    }
    if tokenizer is not None:
        eos, more = tokenizer.eos_token_id, tokenizer.additional_stop_token_ids or ()
        found["tokenizer"] = sorted({*(() if eos is None else (eos,)), *more})
    return found


def memory_request(what: Literal["Release", "Resume"], tags: Sequence[str]) -> Any:
    """Returns what the scheduler's weight updater is asked to release or resume memory with."""
    from sglang.srt.managers import io_struct

    return getattr(io_struct, f"{what}MemoryOccupationReqInput")(tags=list(tags))


def is_scoring_batch(batch: Any) -> bool:
    """Returns whether a forward pass computes logits of prompt positions."""
    return bool(batch.forward_mode.is_extend() and batch.return_logprob)


def pass_of(batch: Any) -> tuple[str, int, int] | None:
    """Returns what a forward pass is: its kind in ServerWork, its requests and its tokens.

    None: another kind.
    """
    requests = len(batch.reqs)
    if batch.forward_mode.is_decode():
        return "decode", requests, sum(req.seqlen for req in batch.reqs)
    if batch.forward_mode.is_extend():
        return "prefill", requests, sum(batch.extend_lens)
    return None


def logit_rows(batch: Any) -> Iterator[tuple[Any, int, int]]:
    """Yields (request, absolute position of its first row, rows) of an extend batch's logits.

    LogitsProcessor._get_pruned_states keeps, per request, the extended tokens from
    extend_logprob_start_len on, and at least the last one.
    """
    for req, prefix, extend, start in zip(
        batch.reqs,
        batch.prefix_lens,
        batch.extend_lens,
        batch.extend_logprob_start_lens,
        strict=True,
    ):
        first = min(start, extend - 1)
        yield req, prefix + first, extend - first


def sampling_filters(info: Any) -> dict[str, torch.Tensor | None]:
    """Returns the truncations SGLang applies in this step, as `sampling.behaviour` takes them."""
    return {
        "top_k_B": info.top_ks if info.need_top_k_sampling else None,
        "top_p_B": info.top_ps if info.need_top_p_sampling else None,
        "min_p_B": info.min_ps if info.need_min_p_sampling else None,
    }


def attach_auxiliary(result: Any, output: Any) -> None:
    """Adds a device output to a step's result; it is copied to the host with the sampled tokens."""
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output

    logits = result.logits_output
    logits.auxiliary_device_output = append_auxiliary_output(logits.auxiliary_device_output, output)


def wrap_delayed_sampling(result: Any, context: Callable[[], Any]) -> None:
    """Runs a step's postponed sampling (grammars under overlap scheduling) inside `context()`."""
    delayed = getattr(result, "delay_sample_func", None)
    if delayed is None:
        return

    def sample() -> Any:
        with context():
            return delayed()

    result.delay_sample_func = sample


def streamer_class(payload_of: Callable[[Any], dict[str, Any] | None], key: str) -> type:
    """Makes a streamer that adds `payload_of(request)` to meta_info[key] when it finishes."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    class BridgeStreamer(SchedulerOutputStreamer):
        """Adds this package's payload to finished requests."""

        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            """Returns one list per request: empty, or the payload."""
            payloads = [payload_of(req) if req.finished() else None for req in reqs]
            if not any(payloads):
                return {}
            return {key: [[] if payload is None else [payload] for payload in payloads]}

        def is_request_level_customized_info_key(self, name: str) -> bool:
            """Returns whether the payload belongs to the request, not to single tokens."""
            return name == key

    return BridgeStreamer


def checksum_payload(
    checker: Any, answer: Callable[[torch.nn.Module], dict[str, str]], *, role: str
) -> dict[str, Any]:
    """Returns what WeightChecker.handle returns, with `answer(model)` as its checksums."""
    return {
        "checksums": answer(checker._get_model()),
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def update_group(runner: Any, name: str) -> tuple[Any, torch.device]:
    """Returns the update group called `name` and the device of its buffers.

    LookupError: this rank has not joined it.
    """
    group = runner.weight_updater._model_update_group.get(name)
    if group is None:
        raise LookupError(f"this rank has not joined a group named {name}")
    on_cpu = torch.distributed.get_backend(group) == "gloo"
    return group, torch.device("cpu" if on_cpu else runner.device)


def leave_update_group(runner: Any, name: str) -> None:
    """Leaves the update group called `name`, if this rank is in it: its peers notice at once."""
    group = runner.weight_updater._model_update_group.pop(name, None)
    if group is not None:
        forget_lanes(group)
        torch.distributed.destroy_process_group(group)


@contextmanager
def process_group_timeout(seconds: float) -> Iterator[None]:
    """Gives process groups that are made inside a timeout shorter than torch's 30 minutes."""
    import datetime

    from sglang.srt.model_executor.model_runner_components import weight_updater

    original = weight_updater.init_custom_process_group

    def with_timeout(**kwargs: Any) -> Any:
        return original(**kwargs, timeout=datetime.timedelta(seconds=seconds))

    weight_updater.init_custom_process_group = with_timeout
    try:
        yield
    finally:
        weight_updater.init_custom_process_group = original
