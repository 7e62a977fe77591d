"""`opd mismatch` with a real server and a real learner, against transformers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from megatron_opd.config.schema import Config
from megatron_opd.metrics.mismatch import compare
from megatron_opd.mismatch.measure import DECODE, FREE, GATED, PREFILL, REPLAYED, MeasuredMismatch
from megatron_opd.mismatch.options import Options
from megatron_opd.mismatch.run import MismatchRun
from megatron_opd.weight_sync.session import WeightSync
from sglang_bridge.client import ServerClient
from tests.e2e.conftest import Sections
from tests.e2e.weight_sync import give, load_tensors, perturbed_copy
from tests.support.figures import bounded

pytestmark = pytest.mark.e2e

PROMPTS, TOKENS, TEMPERATURE = 10, 24, 0.8
EDGES = (8, 24)


def small(student_model: Path, tmp_path: Path, shared: Sections) -> dict[str, Any]:
    lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(PROMPTS)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    server = {"model": str(student_model), "dtype": "float32", "context_length": 256}
    return {
        "run": {"dir": str(tmp_path / "run"), "seed": 3},
        "data": {"train": str(tmp_path / "train.jsonl"), "task": "exact"},
        "student": server | shared["student"],
        "teacher": {"model": "/nowhere"},
        "rollout": {"max_new_tokens": TOKENS, "temperature": TEMPERATURE, "concurrency": 4},
        "support": {"m": 4},
        "buffer": {"batch_size": 4},
        "learner": {
            "dtype": "float32",
            "threads": 1,
            "routing_replay": "rollout",
            "routing_weights": "sampler",
        },
    }


def oracle(model: Path, measured: MeasuredMismatch) -> list[np.ndarray]:
    """Log-probs of the sampled tokens by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for rollout in measured.rollouts:
        prompt, response = rollout.prompt.token_ids_P, rollout.response_ids_T
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        with torch.no_grad():
            logits = reference(ids).logits[0].double() / TEMPERATURE
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(rows[torch.arange(len(response)), ids[0, len(prompt) :]].numpy())
    return found


def measured_by(tree: dict[str, Any]) -> MeasuredMismatch:
    options = Options(PROMPTS, EDGES, 0.1, None, None)
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    return MismatchRun(Config.model_validate(tree), options, console).measure()


def version_of(url: str) -> int:
    async def ask() -> int:
        async with ServerClient(url, timeout_s=10) as client:
            return await client.version()

    return asyncio.run(ask())


def test_every_side_against_transformers_and_a_control_without_the_sync(
    student_model: Path, tmp_path: Path, shared: Sections, monkeypatch: pytest.MonkeyPatch
):
    tree = small(student_model, tmp_path, shared)
    measured = measured_by(tree)
    assert [r.prompt.uid for r in measured.rollouts] == list(range(PROMPTS))
    exact = oracle(student_model, measured)
    for side in (DECODE, PREFILL, FREE, REPLAYED, GATED):
        for mine, theirs in zip(measured.logp[side], exact, strict=True):
            gap = np.abs(np.asarray(mine, np.float64) - theirs).max()
            bounded(f"opd mismatch: {side} against transformers, nats", gap, 2e-5)
    found = measured.comparisons(EDGES, 0.1)
    # the same tokens, the learner's figures replaced by transformers'
    theirs = compare(measured.logp[DECODE], [np.float32(e) for e in exact], EDGES, 0.1).gap
    gap = found["decode_learner"].gap
    assert abs(gap.max_dp.max - theirs.max_dp.max) < 2e-5
    assert 0 < gap.max_dp.max < 2e-5
    assert gap.above == 0
    assert measured.routing is not None
    inputs = sum(r.num_tokens - 1 for r in measured.rollouts)
    assert measured.routing.choices == inputs * 2 * 2, "2 layers, top 2"
    assert measured.routing.free == measured.routing.replayed == measured.routing.gated == 0
    (url,) = shared["student"]["urls"]
    assert version_of(url) == 0, "the server can be used by a run"

    # Control: servers that did not get the learner's weights.
    async def no_sync(self: WeightSync, version: int) -> None:
        return None

    other = perturbed_copy(student_model, tmp_path / "other", 0.2, seed=5)
    asyncio.run(give(url, load_tensors(other)))
    monkeypatch.setattr(WeightSync, "sync", no_sync)
    stale = measured_by(tree).comparisons(EDGES, 0.1)
    assert stale["decode_learner"].gap.max_dp.median > 0.01
    assert stale["decode_learner"].gap.k3_nats > 0.01
    assert stale["decode_prefill"].gap.max_dp.max < 2e-5, "the sampler agrees with itself"


def start(tree: dict[str, Any], tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_opd", "mismatch", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )


def test_the_program_and_ctrl_c(student_model: Path, tmp_path: Path, shared: Sections):
    tree = small(student_model, tmp_path, shared)
    tree["student"]["tp"] = 2  # as servers that this program started would be, not those there
    wanted = ["--prompts", "6", "--max-tokens", "16", "--buckets", "8,16"]
    files = SimpleNamespace(json=tmp_path / "gap.json", plot=tmp_path / "gap.svg")
    asked = start(tree, tmp_path, *wanted, "--json", str(files.json), "--plot", str(files.plot))
    output = asked.communicate(timeout=120)[0]
    assert asked.returncode == 0, output
    figures = json.loads(files.json.read_text())
    assert figures["learner_routing"] == "replayed with gate weights"
    assert len(figures["responses"]) == 6
    sampler = {"dtype": "float32", "tp": 1, "ep": 1, "servers": 1}
    assert figures["sampler"] == sampler, "by its own words"
    gap = figures["comparisons"]["decode_learner"]["gap"]
    assert 0 < gap["max_dp"]["max"] < 2e-5
    assert f"{gap['max_dp']['max']:.1e}" in output
    assert files.plot.read_text().startswith("<?xml")
    assert not (tmp_path / "run").exists()

    stopped = start(tree, tmp_path)
    seen: set[psutil.Process] = set()
    deadline = time.monotonic() + 60
    while not any("megatron_opd.learner" in " ".join(p.cmdline()) for p in seen):
        assert stopped.poll() is None, stopped.communicate()[0]
        assert time.monotonic() < deadline
        seen.update(psutil.Process(stopped.pid).children(recursive=True))
        time.sleep(0.05)
    seen.update(psutil.Process(stopped.pid).children(recursive=True))
    stopped.send_signal(signal.SIGINT)
    output = stopped.communicate(timeout=30)[0]
    assert stopped.returncode == 130, output
    assert output.splitlines()[-1] == "interrupted"
    alive = psutil.wait_procs(list(seen), timeout=5)[1]
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "processes are left"
    assert list(tmp_path.glob("opd-mismatch-*")) == []
