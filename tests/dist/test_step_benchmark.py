"""The step benchmark at its tiny size: its figures, its layouts, and cases that fail."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step
from benchmarks.step_rank import run_case
from harness.synthetic import Shape, sample
from megatron_opd.batching.rank_batch import check_sample
from tests.dist.worlds import run_world

pytestmark = pytest.mark.dist


def _case(out: Path, file: str) -> None:
    run_case(Path(file))


def _warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks from the fork server instead of new interpreters."""

    def run(command: list[str], ranks: int, limit_s: float) -> str:
        run_world(_case, ranks, tmp_path / "world", file=command[-1])
        return ""

    monkeypatch.setattr(step, "_run", run)


def test_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _warm(monkeypatch, tmp_path)
    monkeypatch.setattr(step, "VARIANTS", (step.VARIANTS[0], step.VARIANTS[-1]))
    found: dict[str, Any] = step.measure(["--size", "tiny", "--peak-tflops", "2"])
    assert len(found["cases"]) == 4
    losses: dict[str, list[float]] = {}
    for case in found["cases"]:
        assert "error" not in case, case
        assert case["loss_finite"]
        assert case["kernels"]["layers here"].startswith("no GPU")
        flops, seconds = case["model_flops_per_update"], case["step_s"]
        assert case["mfu"] == pytest.approx(flops / seconds / 2e12)
        assert case["tokens_per_s"] == pytest.approx(8 * 15 / seconds)
        expected = losses.setdefault(case["model"], case["losses"])
        # Neither recomputation nor how log-probs are made may change what is computed.
        assert case["losses"] == pytest.approx(expected, rel=0.05, abs=1e-3)
    for model in found["models"].values():
        assert model["active_layer_elements"] < model["active_parameters"] <= model["parameters"]


def test_two_ranks_compute_what_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _warm(monkeypatch, tmp_path)
    options = ["--size", "tiny", "--variants", "1"]
    one = step.measure(options)["cases"][0]
    two = step.measure([*options, "--layout", "dp=2"])["cases"][0]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=0.05)
    assert two["model_flops_per_update"] == one["model_flops_per_update"]
    assert two["mfu"] is None
    for case in (one, two):
        for row in case["metrics"]:
            counted = row["tflops_per_rank"] * 1e12 * row["train_s"] * case["ranks"]
            assert counted == pytest.approx(case["model_flops_per_update"], rel=0.02)  # whole MFLOP
            assert row["mfu"] is None


def test_a_case_that_fails_says_why(tmp_path: Path):
    fails = [sys.executable, "-c", "import sys; sys.exit('out of memory')"]
    assert step._run(fails, 1, 60) == "out of memory"
    one = "import os, sys, time; sys.exit('rank 1 fell') if os.environ['RANK'] == '1' else 0; "
    assert step._run([sys.executable, "-c", one + "time.sleep(60)"], 2, 50) == "rank 1 fell"
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert step._run(waits, 1, 0.5) == "ended after 0 s"
    assert step._case(tmp_path, tmp_path, {}, step.SIZES["tiny"], 0)["error"].startswith("not run")


def test_synthetic_caches_are_caches():
    shape = Shape(samples=1, prompt=5, response=50, least_ids=4, most_ids=8)
    made = sample(3, shape, vocab=97)
    check_sample(made)
    draws = made.rollout.draws
    rows = [
        draws.ids_N[first:last]
        for first, last in zip(draws.offsets_T1[:-1], draws.offsets_T1[1:], strict=True)
    ]
    assert {len(row) for row in rows} == {4, 5, 6, 7, 8}
    assert all(len(set(row.tolist())) == len(row) for row in rows)
    assert draws.weight_N.sum() == pytest.approx(50)
    assert math.exp(draws.sampler_logp_N.mean()) == pytest.approx(1 / 97, rel=0.05)
