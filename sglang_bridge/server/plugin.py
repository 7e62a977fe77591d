"""Registers the hooks: the entry point of `sglang.srt.plugins`, run in all processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import torch

from sglang_bridge import wire
from sglang_bridge.server import (
    compiling,
    disk_reader,
    draws,
    front,
    gates,
    invariance,
    loaded,
    memory,
    meter,
    pieces,
    receiver,
    routing,
    score_plan,
    scoring,
    seeded,
    torch_kernels,
    validate,
)
from sglang_bridge.server.compat import (
    batches,
    delta_net,
    hooks,
    language_models,
    logit_rows,
    mla,
    qk_norm,
    ranks,
    rotary,
    sinks,
    startup,
)
from sglang_bridge.server.experts import local_experts_only
from sglang_bridge.server.sampling import dropped
from sglang_bridge.server.spec import (
    ENABLED_VARIABLE,
    GATES_VARIABLE,
    GROUP_TIMEOUT_VARIABLE,
    NUM_IDS_VARIABLE,
    QUANTIZATION_VARIABLE,
    SEED_VARIABLE,
    WEIGHTS_DIR_VARIABLE,
)
from sglang_bridge.weights.device_lane import gpu_of
from sglang_bridge.weights.formats import HELD_AS, SCALES_SUFFIX
from sglang_bridge.weights.same_host import find_lanes
from sglang_bridge.weights.share import decode_share

_rows: scoring.PassRows | None = None  # of the forward pass being launched
_plan: score_plan.ScorePlan | None = None  # for it
_generator: torch.Generator | None = None  # for the teacher's draws
_runner: Any = None  # SGLang's model runner
_scheduler: Any = None  # SGLang's, of this rank
_receiver: receiver.Receiver | None = None  # once weights are expected
_meter = meter.PassMeter()
_reader: disk_reader.DiskReader | None = None  # once weights come from disk


def register() -> None:
    """Registers every hook with SGLang, where the plugin is enabled (spec.ENABLED_VARIABLE).

    SystemExit: another SGLang than the supported one. (It would log an exception and go on.)
    """
    if os.environ.get(ENABLED_VARIABLE) != "1":
        return
    try:
        hooks.require_supported_version()
    except RuntimeError as error:
        sys.stderr.write(f"error: {error}, or start it without {ENABLED_VARIABLE}=1\n")
        raise SystemExit(2) from None
    startup.bind_stores()
    if multiprocessing.parent_process() is None:
        hooks.hook(hooks.SERVE, front.before_serving, "before")
    hooks.hook(hooks.AFTER_RUNNER_INIT, install_observer, "after")
    hooks.hook(hooks.STREAMER_CLASS, streamer_class, "replace")
    hooks.hook(hooks.WHILE_PAUSED, rest_while_paused, "after")
    hooks.hook(hooks.ON_IDLE, before_idling, "before")
    hooks.hook(hooks.FORWARD, around_forward, "around")
    hooks.hook(hooks.INPUT_LOGPROBS, around_input_logprobs, "around")
    hooks.hook(hooks.CHECK_WEIGHTS, around_check_weights, "around")
    hooks.hook(hooks.VALIDATE, around_validate, "around")
    hooks.hook(hooks.NATIVE_EXPERTS, local_experts_only, "around")
    hooks.hook(hooks.INIT_GROUP, around_init_group, "around")
    hooks.hook(hooks.BATCH_INVARIANT, around_batch_invariant, "around")
    hooks.hook(hooks.LOGITS, around_logits, "around")
    hooks.hook(hooks.SAMPLE, around_sample, "around")
    hooks.hook(hooks.LOAD_MODEL, loaded.around_load_model, "around")
    hooks.hook(hooks.LOAD_WEIGHTS, loaded.around_load_weights, "around")
    hooks.hook(hooks.PARSE_CONFIG, language_models.around_parse, "around")
    hooks.hook(hooks.QUANT_CONFIG, around_quant_config, "around")
    if gates.kept():
        hooks.hook(hooks.EXPERT_RECORD, gates.around_record, "around")
        hooks.hook(hooks.EXPERT_CHOICE, gates.around_choice, "around")
        hooks.hook(hooks.EXPERT_CAPTURE, gates.around_capture, "around")
    if torch.cuda.is_available():
        hooks.hook(hooks.BUILD_LOCK, compiling.say_kernel, "before")
    else:
        hooks.hook(hooks.ROPE_ON_CPU, mla.around_rope, "around")
        ranks.allow_deterministic_attention("torch_native")
        sinks.register()
        torch_kernels.register()


def install_observer(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Gives the output rank its draws: the model runner's observer, the scores' generator."""
    global _generator, _runner
    if not torch.cuda.is_available():
        mla.always_absorb()
        delta_net.answer_in_torch()
        qk_norm.answer_in_torch()
    rotary.store_apart(runner.model)
    if ranks.is_deterministic() and not torch.cuda.is_available():
        named = runner.model.named_parameters()
        invariance.check(held for name, held in named if not name.endswith(SCALES_SUFFIX))
    if runner.is_draft_worker:
        return
    _runner = runner
    if ranks.is_output_rank():
        seed = int(os.environ.get(SEED_VARIABLE, "0"))
        runner.sampling_observer = draws.DrawObserver(runner.device, seed)
        _generator = torch.Generator(device=runner.device)
        _generator.manual_seed(seed)


@cache
def model_experts() -> routing.Experts:
    """Describes the experts of this server's model; not for while the runner is being built."""
    return routing.Experts(*ranks.experts_of(_runner.model, _runner.model_config))


def payload_of(req: Any) -> dict[str, Any] | None:
    """Returns what a finished request carries home, or None."""
    records = {
        wire.DRAWS: draws.RECORD,
        wire.SCORES: scoring.RECORD,
        wire.EXPERTS: routing.RECORD,
    }
    found = {key: batches.find_record(req, name) for key, name in records.items()}
    return {key: record.payload() for key, record in found.items() if record is not None} or None


def streamer_class(scheduler: Any) -> type:
    """Returns SGLang's output streamer with our payload."""
    global _scheduler
    _scheduler = scheduler
    return batches.streamer_class(payload_of, wire.PAYLOAD)


def rest_while_paused(result: None, scheduler: Any) -> None:
    """Lets a paused scheduler wait for its next request as an idle one does.

    SGLang's loop spins then, which on a CPU takes a core from whoever brings the new weights.
    """
    _meter.end()
    scheduler.maybe_sleep_on_idle()


def before_idling(*args: Any, **kwargs: Any) -> None:
    """Ends the last forward pass where nothing follows it."""
    _meter.end()


def around_forward(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Gives a forward pass its requests' seeds and the rows of its logits, on every rank.

    The one with outputs records.
    """
    global _rows
    if batch is None:
        return original(worker, batch, *args, **kwargs)
    _meter.begin(batch)
    if batches.is_scoring_batch(batch) and any(map(scoring.wants_scores, batch.reqs)):
        _rows = scoring.rows_of(batch)
    try:
        with batches.sampled_by(batch, batches.batch_seeds(batch)):
            if ranks.is_output_rank():
                return recorded(original, worker, batch, *args, **kwargs)
            return original(worker, batch, *args, **kwargs)
    finally:
        _rows = None


def recorded(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plans what a forward pass is to record before its launch, attaches what it left after."""
    global _plan
    step = draws.step_of(batch)
    slots = routing.slots_of(batch, model_experts)
    if _rows is not None:
        assert _generator is not None
        _plan = score_plan.ScorePlan(_rows, _generator)
    plan = _plan
    try:
        with draws.sampling_step(step):
            result = original(worker, batch, *args, **kwargs)
    finally:
        _plan = None
    if step is not None:
        batches.wrap_delayed_sampling(result, lambda: draws.sampling_step(step))
    if plan is not None and plan.parts:
        batches.attach_auxiliary(result, plan)
    if slots is not None:
        batches.attach_auxiliary(result, slots)
    return result


def around_input_logprobs(
    original: Callable[..., Any],
    processor: Any,
    pruned_states: torch.Tensor,
    *args: Any,
    get_logits_fn: Callable[..., torch.Tensor],
    **kwargs: Any,
) -> Any:
    """Computes the rows of this pass, on every rank, and shows its plan each chunk of logits."""
    plan, rows = _plan, _rows

    def scored(processor: Any, states_LH: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tapped = get_logits_fn
        if plan is not None and plan.parts:
            plan.begin(states_LH.shape[0], states_LH.device)
            tapped = plan.tap(get_logits_fn)
        return original(processor, states_LH, *args, get_logits_fn=tapped, **kwargs)

    if rows is None or rows.chosen_L is None:
        return scored(processor, pruned_states, *args, **kwargs)
    return logit_rows.computed(rows.chosen_L, scored, processor, pruned_states, *args, **kwargs)


def around_check_weights(
    original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any
) -> Any:
    """Adds actions to /weights_checker: what the model holds, and the receiving of weights."""
    verb, _, argument = action.partition(" ")
    answers: dict[str, Callable[[torch.nn.Module], dict[str, str]]] = {
        wire.PIECE_ACTION: pieces.piece_list,
        wire.DIGEST_ACTION: live_digests,
        wire.MODEL_ACTION: model_facts,
        wire.GPU_ACTION: lambda _: {wire.GPU: gpu_of(torch.device(_runner.device))},
        wire.PROGRESS_ACTION: lambda _: progress(),
        wire.WORK_ACTION: lambda _: {wire.WORK: msgspec.json.encode(_meter.work()).decode()},
        wire.EXPECT_ACTION: lambda model: expect_weights(model, argument),
        wire.SAME_HOST_ACTION: lambda _: find_lanes_here(argument),
        wire.STAGE_ACTION: lambda _: stage_weights(argument),
        wire.STAGED_DIGEST_ACTION: lambda _: staged_digests(),
        wire.STAGED_ACTION: lambda _: the_receiver().staged(),
        wire.LOST_ACTION: lambda _: the_receiver().lost(),
        wire.RECEIVE_ACTION: lambda _: receive_weights(argument),
        wire.RELEASE_ACTION: lambda _: memory.release(_scheduler, argument.split(",")),
        wire.RESUME_ACTION: lambda _: memory.resume(_scheduler, argument.split(",")),
        **{name: lambda model: read_weights(model, verb, argument) for name in disk_reader.ACTIONS},
    }
    if verb not in answers:
        return original(checker, action, *args, **kwargs)
    # a rank that raised would leave the others waiting for its answer
    return ranks.checksum_payload(
        checker,
        lambda model: receiver.answer(lambda: answers[verb](model), _receiver),
        role=kwargs["role"],
    )


def live_digests(model: torch.nn.Module) -> dict[str, str]:
    """Returns {piece key: digest} of every parameter that this rank computes with.

    Raises StaleCopies where it computes with something else.
    """
    mla.require_current(model)
    return pieces.piece_digests(model)


def model_facts(model: Any) -> dict[str, str]:
    """Returns what the client asks of a model; text, as the reply carries only text."""
    format = os.environ.get(QUANTIZATION_VARIABLE, wire.NOT_QUANTISED)
    ends = json.dumps(ranks.ends_of(_scheduler))
    ids = num_ids(model.config.vocab_size)
    return pieces.model_facts(model, ids) | {wire.QUANTIZATION: format, wire.ENDS: ends}


def progress() -> dict[str, str]:
    """Returns how far this rank is with its requests (sglang_bridge/deadlines.py)."""
    running, waiting = ranks.requests_of(_scheduler)
    return {wire.RUNNING: json.dumps(running), wire.WAITING: json.dumps(waiting)}


def expect_weights(model: torch.nn.Module, share: str) -> dict[str, str]:
    """Prepares this rank for its part of the server's share (sglang_bridge/weights/share.py)."""
    global _receiver, _reader
    if _receiver is None:
        _receiver = receiver.Receiver(model)
    _reader = None  # one way at a time
    size = _receiver.expect(decode_share(share, ranks.tp_rank()))
    return {wire.RECEIVED_BYTES: str(size)}


def find_lanes_here(group_name: str) -> dict[str, str]:
    """Finds with all ranks of the update group `group_name` which of them are on one host.

    A rank that fails leaves the group.
    """
    group, _ = ranks.update_group(_runner, group_name)
    try:
        find_lanes(group, torch.device(_runner.device), receives=True)
    except BaseException:
        ranks.leave_update_group(_runner, group_name)
        raise
    return {}


def stage_weights(group_name: str) -> dict[str, str]:
    """Begins to receive staged weights from the update group `group_name`.

    A rank that fails leaves the group, so that no one waits for it until the group's timeout.
    """
    group, device = ranks.update_group(_runner, group_name)
    leave = partial(ranks.leave_update_group, _runner, group_name)
    the_receiver().stage(group, device, leave)
    return {}


def staged_digests() -> dict[str, str]:
    """Digests staged weights; while that takes, the answer is wire.PENDING."""
    found = (the_receiver() if _reader is None else _reader).staged_digests()
    return {wire.PENDING: ""} if found is None else found


def receive_weights(group_name: str) -> dict[str, str]:
    """Makes staged weights live and receives the others from the update group `group_name`.

    A rank that fails leaves the group, so that no one waits for it until the group's timeout.
    """
    try:
        the_receiver().receive(*ranks.update_group(_runner, group_name))
    except BaseException:
        ranks.leave_update_group(_runner, group_name)
        raise
    return {}


def read_weights(model: torch.nn.Module, verb: str, argument: str) -> dict[str, str]:
    """Lets this rank's reader of weights on disk do what `verb` says."""
    global _reader
    if _reader is None:
        root = os.environ.get(WEIGHTS_DIR_VARIABLE)
        _reader = disk_reader.DiskReader(pieces.pieces(model), root)
    return disk_reader.ACTIONS[verb](_reader, argument)


def the_receiver() -> receiver.Receiver:
    """Returns this rank's receiver. BadExpectation: nothing was ever expected here."""
    if _receiver is None:
        raise receiver.BadExpectation("no weights are expected here")
    return _receiver


def around_validate(
    original: Callable[..., Any], manager: Any, obj: Any, input_ids: list[int]
) -> None:
    """Rejects, with HTTP 400, what would crash a scheduler or make its draws wrong."""
    original(manager, obj, input_ids)
    validate.check_input_ids(input_ids, manager.model_config.vocab_size)
    params = (obj.sampling_params or {}).get("custom_params") or {}
    vocab_size = num_ids(manager.model_config.vocab_size)
    if (wire.NUM_DRAWS in params or wire.SCORE_IDS in params) and not params.get(wire.PACKED):
        routes = f"{wire.WORK_ROUTE} and {wire.SCORE_ROUTE}"
        raise ValueError(f"draws and scores are answered by {routes}, not by this route")
    if wire.NUM_DRAWS in params:
        validate.check_draw_params(params, obj, vocab_size)
    if params.get(wire.WANTS_EXPERTS) and not ranks.keeps_experts(manager):
        raise ValueError(
            "routed experts need a server started with --enable-return-routed-experts, and a model "
            "with experts"
        )
    if params.get(wire.WANTS_GATES) and not (params.get(wire.WANTS_EXPERTS) and gates.kept()):
        raise ValueError(
            "gate weights need routed experts, and a server started with the environment variable "
            f"{GATES_VARIABLE}=1"
        )
    if gates.kept() and getattr(obj, "return_routed_experts", False):
        raise ValueError(
            f"return_routed_experts must be false on a server with {GATES_VARIABLE}=1, whose "
            "record of experts also holds their weights"
        )
    if wire.SCORE_IDS in params:
        validate.check_score_params(params, len(input_ids), vocab_size)
        start = scoring.runs_of(params)[0][0] - 1
        if not obj.return_logprob or obj.logprob_start_len != start:
            raise ValueError(f"scoring needs return_logprob and logprob_start_len={start}")


def num_ids(rows: int) -> int:
    """Returns the ids of the model that have a probability, of the rows of its vocabulary."""
    return int(os.environ.get(NUM_IDS_VARIABLE, rows))


def around_logits(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Takes the ids that are only padding out of what is sampled from, drawn and scored."""
    logits_BV = original(*args, **kwargs)
    if NUM_IDS_VARIABLE in os.environ:
        logits_BV[:, num_ids(logits_BV.shape[-1]) :] = -torch.inf
    return logits_BV


def around_batch_invariant(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Makes products' rows independent of the batch, on a CPU too."""
    if torch.cuda.is_available():
        original(*args, **kwargs)
    else:
        invariance.enable()


def around_sample(
    original: Callable[..., Any],
    sampler: Any,
    probs_BV: torch.Tensor,
    info: Any,
    position_B: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Samples by the requests' seeds where the pass has them; returns (ids int32 [B], None).

    From rows in the vocabulary's order, truncated or not, so that a number belongs to an id and not
    to a rank, and with any sampling backend. SGLang's sampling masks, which nothing here asks for,
    leave a step to SGLang.
    """
    draws.show_probabilities(probs_BV)
    if info.sampling_seed is None:
        return original(sampler, probs_BV, info, position_B, *args, **kwargs)
    if info.sampling_mask_batch_indices is not None:
        info = info if ranks.is_deterministic() else batches.without_seeds(info)
        return original(sampler, probs_BV, info, position_B, *args, **kwargs)
    filters = batches.sampling_filters(info)
    if any(values is not None for values in filters.values()):
        # not in place: SGLang may return log-probs of them
        probs_BV = probs_BV.masked_fill(dropped(probs_BV, **filters), 0.0)
    ids_B = seeded.choose(probs_BV, info.sampling_seed, position_B)
    return ids_B.to(torch.int32), None


def around_quant_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lets layers hold their matrices as the server was told to.

    Raises ValueError where SGLang quantises them already.
    """
    config, format = original(*args, **kwargs), os.environ.get(QUANTIZATION_VARIABLE)
    if format is None:
        return config
    if config is not None or format not in HELD_AS:
        how = f"one of {', '.join(HELD_AS)}" if config is None else "unset: SGLang quantises itself"
        raise ValueError(f"{QUANTIZATION_VARIABLE} must be {how}, got {format!r}")
    # imported late: it needs most of SGLang
    from sglang_bridge.server.quantised import RowScaledConfig

    return RowScaledConfig("int8" if format == "int8" else "fp8")


def around_init_group(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Bounds how long a rank waits for a silent peer of the update group."""
    seconds = float(os.environ.get(GROUP_TIMEOUT_VARIABLE, "300"))
    with ranks.process_group_timeout(seconds):
        return original(updater, *args, **kwargs)
