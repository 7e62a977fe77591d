"""One learner update of a random Qwen3 and Qwen3-MoE in bfloat16: tokens/s, model FLOPs, memory.

    python -m benchmarks step [--size tiny] [--layout dp=2] [--peak-tflops X] [--budget-s 480]

The project's own learner trains on synthetic caches of 4 to 8 ids a token, from random weights, on
the kernels that config/kernels.py chooses here. Every case (recomputation, log-prob path) runs in
processes of its own; seconds are the median of the updates after warm-up, with the device
synchronised. Utilisation is sizing/flops.py's model FLOPs, for which recomputation does not
count, against the GPU's dense bfloat16 peak; null where that is not known. A case that fails, or
for which no time is left, says so in place of its figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.synthetic import Shape, write_model
from megatron_opd.config.learner import ParallelConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.flops import PEAK_BF16_TFLOPS, mfu
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.sizing.served import size_of
from sglang_bridge.ports import free_port

Tree = dict[str, Any]

QWEN3_1_7B: Tree = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# 1.6 B parameters, 0.55 B of them for a token: Qwen3-30B-A3B's ratios at a third of its layers.
QWEN3_MOE_1_6B: Tree = QWEN3_1_7B | {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
TINY: Tree = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


@dataclass(frozen=True)
class Size:
    """models: config.json by name. shape: of an update's batch."""

    models: dict[str, Tree]
    shape: Shape
    max_tokens_per_microbatch: int
    warm_up: int
    steps: int


SIZES = {
    "full": Size(
        {"qwen3-1.7b": QWEN3_1_7B, "qwen3-moe-1.6b": QWEN3_MOE_1_6B},
        Shape(samples=32, prompt=512, response=1536, least_ids=4, most_ids=8),
        max_tokens_per_microbatch=16_384,
        warm_up=2,
        steps=5,
    ),
    "tiny": Size(
        {
            "qwen3-tiny": QWEN3_1_7B | TINY,
            "qwen3-moe-tiny": QWEN3_MOE_1_6B
            | TINY
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        },
        Shape(samples=8, prompt=4, response=12, least_ids=4, most_ids=8),
        max_tokens_per_microbatch=64,
        warm_up=1,
        steps=2,
    ),
}
# Plain, then what each of the two settings costs, then both.
VARIANTS: tuple[Tree, ...] = (
    {"recompute": "none", "logp": "lean"},
    {"recompute": "full", "logp": "lean"},
    {"recompute": "none", "logp": "dense"},
    {"recompute": "full", "logp": "dense"},
)


def measure(options: Sequence[str] = ()) -> Tree:
    """Every model in every variant, the plain ones first. options: the command line's."""
    arguments = _arguments(options)
    size, started = SIZES[arguments.size], time.perf_counter()
    layout = ParallelConfig.model_validate(arguments.layout)
    cases: list[Tree] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = {
            name: write_model(Path(scratch) / name, tree) for name, tree in size.models.items()
        }
        _say(f"models written after {time.perf_counter() - started:.0f} s")
        chosen = VARIANTS if arguments.variants is None else VARIANTS[: arguments.variants]
        for variant in chosen:
            for name, model in models.items():
                learner = {"parallel": layout.model_dump(), "dtype": "bfloat16", **variant}
                learner["max_tokens_per_microbatch"] = size.max_tokens_per_microbatch
                left_s = arguments.budget_s - (time.perf_counter() - started)
                figures = _case(Path(scratch), model, learner, size, left_s)
                figures = _with_utilisation(figures, arguments.peak_tflops)
                cases.append({"model": name, **variant, **figures})
                _say(f"{time.perf_counter() - started:.0f} s: {json.dumps(cases[-1])}")
        parameters = {name: _parameters(model) for name, model in models.items()}
    return {
        "size": arguments.size,
        "layout": arguments.layout,
        "dtype": "bfloat16, float32 main parameters",
        "batch": asdict(size.shape) | {"max_tokens_per_microbatch": size.max_tokens_per_microbatch},
        "warm_up": size.warm_up,
        "steps": size.steps,
        "models": parameters,
        "wall_s": time.perf_counter() - started,
        "cases": cases,
    }


def _arguments(options: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--layout", type=_layout, default={}, help="learner.parallel, such as tp=2,dp=2"
    )
    parser.add_argument("--peak-tflops", type=float, help="of one GPU, bfloat16, dense")
    parser.add_argument("--budget-s", type=float, default=480.0, help="begin no case after it")
    parser.add_argument("--variants", type=int, help="only the first so many of each model")
    return parser.parse_args(list(options))


def _layout(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in (part.split("=") for part in text.split(","))}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parameters(model: Path) -> Tree:
    """What was built, and N of sizing/flops.py."""
    spec = read_model_spec(model)
    return {
        "config": json.loads((model / "config.json").read_text(encoding="utf-8")),
        "parameters": model_parameters(spec).total,
        "active_parameters": size_of(spec).active_parameters,
        "active_layer_elements": size_of(spec).active_layer_elements,
    }


def _case(scratch: Path, model: Path, learner: Tree, size: Size, left_s: float) -> Tree:
    """The figures of one case, or {error}. left_s: it is ended after so many seconds."""
    if left_s <= 0:
        return {"error": "not run: no time left (--budget-s)"}
    out, file = scratch / "figures.json", scratch / "case.json"
    out.unlink(missing_ok=True)
    case = {
        "model": str(model),
        "learner": learner,
        "shape": asdict(size.shape),
        "warm_up": size.warm_up,
        "steps": size.steps,
        "out": str(out),
    }
    file.write_text(json.dumps(case), encoding="utf-8")
    ranks = ParallelConfig.model_validate(learner["parallel"]).world_size
    last = _run([sys.executable, "-m", "benchmarks.step_rank", str(file)], ranks, left_s)
    if out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    return {"error": last}


def _run(command: Sequence[str], ranks: int, limit_s: float) -> str:
    """Run `ranks` processes of it, their output on stderr; what the first to fail said last."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | world
    deadline, running, failed = time.monotonic() + limit_s, list[Rank](), "it ended without figures"
    try:
        for rank in range(ranks):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(Rank(command, own))
        while any(each.process.poll() is None for each in running):
            if time.monotonic() > deadline:
                return f"ended after {limit_s:.0f} s"
            if any(each.process.poll() for each in running):
                break  # its peers wait for it in a collective
            time.sleep(0.1)
    finally:
        for each in running:
            failed = each.end() or failed
    return failed


class Rank:
    """A process whose output goes to stderr, line by line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        output = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._last = "no output"
        self._reader = threading.Thread(target=self._echo, daemon=True)
        self._reader.start()

    def _echo(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            sys.stderr.write(line)
            self._last = line.strip() or self._last

    def end(self) -> str | None:
        """Kill it if it runs; the last line that it wrote if it had failed before."""
        code = self.process.poll()
        if code is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        return self._last if code else None


def _with_utilisation(figures: Tree, stated_tflops: float | None) -> Tree:
    if "error" in figures:
        return figures
    known = PEAK_BF16_TFLOPS.get(figures["gpu"])
    peak = known if stated_tflops is None else stated_tflops
    flops, step_s, ranks = (figures[key] for key in ("model_flops_per_update", "step_s", "ranks"))
    return figures | {"peak_tflops": peak, "mfu": mfu(flops, step_s, ranks, peak)}
