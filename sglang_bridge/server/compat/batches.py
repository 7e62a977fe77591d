"""Reads and changes the requests and batches of a forward pass."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_bridge.server.compat import ranks

DEFAULT_SEED = 42  # SamplingBatchInfo.from_schedule_batch: of a request that names none


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
    if info is None or info.is_all_greedy or ranks.is_deterministic() or batch.is_prefill_only:
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
