"""Log-probs of a big vocabulary, forward and backward: dense logits against blocks of them.

Each run of a path is a process of its own; the paths take turns, so that a slow minute of the
machine falls on both. Peak extra memory counts from the moment when inputs, weight and the buffer
of the weight's gradient are resident (Megatron's main_grad: both paths add to it), the same for
both paths. `python -m benchmarks.lean_logp PATH DEVICE` is one run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron_opd.losses.blocks import default_block
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.vocab_parallel import gather_logp

THREADS, REPEATS = 2, 5
PATHS = ("dense", "lean")


@dataclass(frozen=True)
class Size:
    """T rows, V ids, H hidden, pairs a row, and the type of inputs and weight."""

    rows: int
    ids: int
    hidden: int
    pairs_a_row: int
    dtype: str


SIZES = {
    "cpu": Size(2048, 151_936, 512, 8, "float32"),
    "cuda": Size(16_384, 151_936, 2048, 8, "bfloat16"),
}
WARM_UP = Size(64, 4096, 64, 8, "float32")


class Inputs:
    """Everything that is resident before a path starts."""

    def __init__(self, size: Size, device: str) -> None:
        dtype = getattr(torch, size.dtype)
        options: Any = {"dtype": dtype, "device": device}
        self.hidden_TH = torch.randn(size.rows, size.hidden, **options).requires_grad_()
        weight_VH = torch.empty(size.ids, size.hidden, **options).normal_(std=size.hidden**-0.5)
        self.weight_VH: Any = torch.nn.Parameter(weight_VH)
        # ones, not zeros: pages that nothing has written are not resident
        self.weight_VH.main_grad = torch.ones_like(self.weight_VH, dtype=torch.float32)
        pairs = size.rows * size.pairs_a_row
        self.row_N = torch.arange(size.rows, device=device).repeat_interleave(size.pairs_a_row)
        self.id_N = torch.randint(size.ids, (pairs,), device=device)
        self.grad_N = torch.randn(pairs, device=device)


def dense(inputs: Inputs) -> None:
    """As in the learner with logits: Megatron's DDP hook adds the finished gradient."""
    weight_VH = inputs.weight_VH

    def hook(weight: Any) -> None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None

    handle = weight_VH.register_post_accumulate_grad_hook(hook)
    # No name holds the logits: they may go as soon as the operation lets them.
    logp_N = gather_logp(F.linear(inputs.hidden_TH, weight_VH), inputs.row_N, inputs.id_N)
    logp_N.backward(inputs.grad_N)
    handle.remove()


def lean(inputs: Inputs) -> None:
    """As in the learner without logits."""
    head = HeadSlice(inputs.weight_VH)
    found = lean_logp(inputs.hidden_TH, head, inputs.row_N, inputs.id_N)
    found.logp_N.backward(inputs.grad_N)


def lean_eager(inputs: Inputs) -> None:
    """The same a block at a time, where kernels would be used."""
    head, block = HeadSlice(inputs.weight_VH), default_block(inputs.hidden_TH)
    found = lean_logp(inputs.hidden_TH, head, inputs.row_N, inputs.id_N, block=block)
    found.logp_N.backward(inputs.grad_N)


def products(inputs: Inputs) -> None:
    """The three matrix products that no path can do without."""
    hidden_TH, weight_VH = inputs.hidden_TH.detach(), inputs.weight_VH.detach()
    logits_TV = hidden_TH @ weight_VH.T
    torch.mm(logits_TV, weight_VH)
    torch.mm(logits_TV.T, hidden_TH)


def _resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM the most since it was last cleared."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status names no {field}")


def run_cpu(path: Callable[[Inputs], None]) -> dict[str, float]:
    """Seconds and peak extra bytes of one run."""
    torch.set_num_threads(THREADS)
    path(Inputs(WARM_UP, "cpu"))
    inputs = Inputs(SIZES["cpu"], "cpu")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark
    before = _resident("VmRSS")
    started = time.perf_counter()
    path(inputs)
    elapsed_s = time.perf_counter() - started
    return {"seconds": elapsed_s, "peak_extra_bytes": _resident("VmHWM") - before}


def run_cuda(path: Callable[[Inputs], None]) -> dict[str, float]:
    """Seconds, the least of several passes, and peak extra bytes allocated by the second one."""
    inputs = Inputs(SIZES["cuda"], "cuda")
    times_s = []
    for _ in range(1 + REPEATS):
        inputs.hidden_TH.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        path(inputs)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started)
        extra = torch.cuda.max_memory_allocated() - before
    return {"seconds": min(times_s[1:]), "peak_extra_bytes": extra}


def _child(path: str, device: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.lean_logp", path, device]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    times_s = [run["seconds"] for run in runs]
    peaks = [run["peak_extra_bytes"] for run in runs]
    return {
        "seconds": round(statistics.median(times_s), 4),
        "seconds_of_each_run": [round(t, 4) for t in times_s],
        "peak_extra_mib": round(statistics.median(peaks) / 2**20, 1),
    }


def measure() -> dict[str, Any]:
    """Both paths side by side, on the CPU, and on a GPU where there is one."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {device: _compare(device) for device in devices}


def _compare(device: str) -> dict[str, Any]:
    names = (*PATHS, "products") if device == "cuda" else PATHS
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repeat in range(REPEATS):
        for name in names:
            runs[name].append(_child(name, device))
            print(f"{device} {name} {repeat + 1}/{REPEATS}: {runs[name][-1]}", file=sys.stderr)
    found = {name: _medians(runs[name]) for name in names}
    size = SIZES[device]
    ratio: dict[str, float] = {
        "peak_extra_of_dense": found["lean"]["peak_extra_mib"] / found["dense"]["peak_extra_mib"],
        "time_of_dense": found["lean"]["seconds"] / found["dense"]["seconds"],
    }
    if "products" in found:
        ratio["time_of_three_products"] = found["lean"]["seconds"] / found["products"]["seconds"]
    block = default_block(torch.empty(size.rows, 0, device=device))
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"threads": THREADS}
    return {
        **gpu,
        "size": asdict(size),
        "block_rows_ids": list(block),
        "runs": REPEATS,
        **found,
        "ratio": {name: round(value, 4) for name, value in ratio.items()},
    }


if __name__ == "__main__":
    path, device = sys.argv[1:]
    function = {"dense": dense, "lean": lean, "products": products}[path]
    print(json.dumps((run_cuda if device == "cuda" else run_cpu)(function)))
