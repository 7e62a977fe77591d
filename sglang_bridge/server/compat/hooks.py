"""Names every function of SGLang that is hooked, and hooks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

SUPPORTED = "0.5.23"

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
PARSE_CONFIG = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
SAMPLE = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
# in the process that serves HTTP, alone
SERVE = "sglang.srt.entrypoints.http_server.launch_server"
# where there is CUDA, alone
BUILD_LOCK = "sglang.kernels.jit.utils.compile.loader._build_lock"
# of servers on a CPU, alone
SHARED_GATE = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
OUTPUT_GATE = "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul"
# of servers that keep gates, alone
EXPERT_RECORD = "sglang.srt.state_capturer.base.BaseTopkCapturer.__init__"
EXPERT_CHOICE = "sglang.srt.layers.moe.topk._post_process_topk_ids"
EXPERT_CAPTURE = "sglang.srt.layers.moe.topk.capture_routed_experts_if_allowed"

# where there is no CUDA, alone
ROPE_ON_CPU = "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"

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
    PARSE_CONFIG,
    LOAD_MODEL,
    LOAD_WEIGHTS,
    INIT_GROUP,
    SERVE,
)
CUDA_TARGETS = (BUILD_LOCK,)
CPU_TARGETS = (SHARED_GATE, OUTPUT_GATE, ROPE_ON_CPU)
GATE_TARGETS = (EXPERT_RECORD, EXPERT_CHOICE, EXPERT_CAPTURE)


def require_supported_version() -> None:
    """Raises RuntimeError unless the installed SGLang is the supported one."""
    installed = version("sglang")
    if installed != SUPPORTED:
        raise RuntimeError(
            f"sglang_bridge supports sglang {SUPPORTED}, found {installed}: "
            f"pip install --no-deps sglang=={SUPPORTED}"
        )


def wanted(*, cuda: bool, gates: bool) -> tuple[str, ...]:
    """Returns what is hooked in the process that serves HTTP."""
    return (*TARGETS, *(CUDA_TARGETS if cuda else CPU_TARGETS), *(GATE_TARGETS if gates else ()))


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
