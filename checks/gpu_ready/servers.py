"""What SGLang makes of the servers' arguments of every GPU example, on cards that it is told of.

It chooses backends by the card's generation. On each, every example's student and teacher must
parse and resolve, plain and in variants, to settings with which the plugin's hooks see what they
must; and every hook must be in place on SGLang's CUDA platform.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from checks.gpu.record import PartFailed
from checks.gpu_ready.card import CARDS, COUNT, pretend
from harness.tree import ROOT
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.launch import gpus
from megatron_opd.launch.servers import make_spec
from sglang_bridge.imports import keep_out
from sglang_bridge.server.entry import NEVER_IMPORTED, arguments_for_device
from sglang_bridge.server.spec import ENABLED_VARIABLE, GATES_VARIABLE, ServerSpec, server_command

EXAMPLES = ROOT / "examples" / "cluster"
MIXTURES = ("four_nodes", "sixteen_nodes")
EVERY = ("one_node", *MIXTURES)
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (EVERY, ()),
    "deterministic": (
        EVERY,
        ("run.deterministic=true", "schedule.type=sync", "schedule.max_staleness=0"),
    ),
    "quantised": (EVERY, ("student.quantization=fp8", "teacher.quantization=int8")),
    "gates": (MIXTURES, ("learner.routing_weights=sampler",)),
    "time_shared": (
        ("one_node",),
        ("schedule={type: sync, time_shared: true}",),
    ),
}
"""{name: (examples, settings)}."""
SHOWN = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "page_size",
    "chunked_prefill_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "disable_custom_all_reduce",
    "enable_deterministic_inference",
    "enable_fp32_lm_head",
    "enable_memory_saver",
    "enable_return_routed_experts",
    "mem_fraction_static",
    "max_running_requests",
)
GIVEN = ("enable_fp32_lm_head", "mem_fraction_static", "max_running_requests")
"""Those of them that the configuration or we choose."""
UNKNOWN_OPTION, UNKNOWN_HOOK = "--no-such-option", "sglang.srt.no.such.function"


def measure() -> dict[str, Any]:
    """Resolved settings by card, example, variant and role. Raises PartFailed for a wrong one."""
    found: dict[str, Any] = {}
    for card in CARDS:
        # SGLang remembers what it was told of the card for as long as its process lives
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[card] = pool.submit(on_card, card).result()
    wrong = [f"{card}: {line}" for card, said in found.items() for line in said["wrong"]]
    if wrong:
        raise PartFailed(f"{len(wrong)} are wrong, the first: {wrong[0]}", found)
    return found


def on_card(name: str) -> dict[str, Any]:
    """Hooks, settings and planted faults on one card, in a process of its own."""
    keep_out(*NEVER_IMPORTED)
    pretend(CARDS[name])
    os.environ[GATES_VARIABLE] = "1"
    gpus.driver_count = lambda: COUNT
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.chdir(ROOT)
    hooked, wrong = hooks()
    settings: dict[str, dict[str, Any]] = {}
    for label, spec in cases():
        try:
            settings[label] = resolved(spec)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # as its parser ends a process
            wrong.append(f"{label}: {type(error).__name__}: {error}")
            continue
        wrong += [f"{label}: {line}" for line in problems(spec, settings[label])]
    plain = next(iter(cases()))[1]
    return {
        "hooks": hooked,
        "servers": len(settings),
        "chosen": grouped(settings),
        "wrong": wrong + planted(plain),
    }


def grouped(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings that SGLang chose, each once, with the servers that have them."""
    servers: dict[str, list[str]] = {}
    for label, found in settings.items():
        chosen = {key: value for key, value in found.items() if key not in GIVEN}
        servers.setdefault(json.dumps(chosen), []).append(label)
    return [{"servers": labels} | json.loads(chosen) for chosen, labels in servers.items()]


def cases() -> Iterator[tuple[str, ServerSpec]]:
    """(label, what a server is started with) of every role of every example in every variant."""
    for variant, (examples, overrides) in VARIANTS.items():
        for example in examples:
            config = load_config(Config, EXAMPLES / example / "config.yaml", list(overrides))
            for role, section in config.served.items():
                seen = tuple(map(str, range(section.tp)))
                spec = make_spec(config, role, 31_000, 0, Path(section.model), seen)
                yield f"{example}, {variant}, {role}", spec


def resolved(spec: ServerSpec, *more: str) -> dict[str, Any]:
    """The settings of SHOWN that SGLang starts such a server with."""
    from sglang.srt.server_args import prepare_server_args

    command = [*server_command(spec), *more]
    arguments = arguments_for_device(command[command.index("-m") + 2 :], cuda=True)
    record: Any = prepare_server_args(arguments)
    record.resolve_once()
    settings = record.resolved_dict()
    return {key: settings[key] for key in SHOWN}


def problems(spec: ServerSpec, settings: Mapping[str, Any]) -> list[str]:
    """What of a server's resolved settings would break what the plugin does."""
    wanted: dict[str, Any] = {
        "enable_fp32_lm_head": True,
        "enable_return_routed_experts": spec.routed_experts,
        "enable_deterministic_inference": spec.deterministic,
        "enable_memory_saver": spec.shares_memory,
        "mem_fraction_static": spec.mem_fraction_static,
        "max_running_requests": spec.max_running_requests,
    }
    if spec.role == "student" or spec.quantization is not None:
        wanted["moe_runner_backend"] = "triton"
    if spec.deterministic:
        wanted["sampling_backend"] = "pytorch"
    return [
        f"{key} is {settings[key]!r}, not {value!r}"
        for key, value in wanted.items()
        if settings[key] != value
    ]


def hooks() -> tuple[int, list[str]]:
    """(how many hooks are in place, what is wrong with them or with the platform)."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins

    from sglang_bridge.server.compat.hooks import (
        require_hooks_in_place,
        wanted,
    )

    os.environ[ENABLED_VARIABLE] = "1"
    load_plugins()
    targets = wanted(cuda=True, gates=True)
    try:
        require_hooks_in_place(targets)
    except RuntimeError as error:
        return 0, [str(error)]
    wrong = [] if current_platform.is_cuda() else [f"SGLang's platform is {current_platform}"]
    try:
        require_hooks_in_place((UNKNOWN_HOOK,))
    except RuntimeError:
        return len(targets), wrong
    return len(targets), [*wrong, f"the planted hook {UNKNOWN_HOOK} counts as in place"]


def planted(spec: ServerSpec) -> list[str]:
    """Nothing, if SGLang refuses an option that it does not have."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            resolved(spec, UNKNOWN_OPTION)
    except SystemExit:
        return []
    return [f"the planted option {UNKNOWN_OPTION} was taken"]
