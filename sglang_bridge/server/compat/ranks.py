"""Reads and changes what one rank of a server holds: model, scheduler, groups, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed

from sglang_bridge.weights import posting


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
        posting.leave(group)


@contextmanager
def process_group_timeout(seconds: float) -> Iterator[None]:
    """Gives process groups that are made inside a timeout shorter than torch's 30 minutes.

    With NCCL it also forms the communicator of each, as the learner's ranks do when they join.
    """
    import datetime

    from sglang.srt.model_executor.model_runner_components import weight_updater

    original = weight_updater.init_custom_process_group

    def with_timeout(**kwargs: Any) -> Any:
        group = original(**kwargs, timeout=datetime.timedelta(seconds=seconds))
        posting.meet(group, torch.device("cuda"))
        return group

    weight_updater.init_custom_process_group = with_timeout
    try:
        yield
    finally:
        weight_updater.init_custom_process_group = original
