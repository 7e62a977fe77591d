"""The verdict on an update's mismatch: alike on all ranks, of own tokens alone, before the step."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_opd.metrics.mismatch_gap import MOST_RATIO, SMALL, Bound, MismatchGap, MismatchLimits
from megatron_opd.records.types import Batch, Sample, VersionSpan
from tests.dist import bound_jobs
from tests.dist.caches import load_float64, make_batch, oracle_update, response_logp
from tests.dist.layouts import ADAM
from tests.dist.worlds import run_world
from tests.support.figures import bounded
from tests.support.models import tiny_qwen3_moe

pytestmark = pytest.mark.dist

VERSION = 3
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2 dp2 ep2": (4, {"pp": 2, "dp": 2, "ep": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(tmp_path_factory.mktemp("bound") / "moe", seed=4)


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    """Samples of the learner's version, of an earlier one, and of both."""
    made = make_batch(model, samples=6, seed=7, vocab=512)
    samples = []
    for number, sample in enumerate(made.samples):
        tokens = sample.rollout.num_response_tokens
        old = (0, tokens, tokens // 2)[number % 3]
        spans = (VersionSpan(VERSION - 1, 0, old), VersionSpan(VERSION, old, tokens))
        own = tuple(span for span in spans if span.stop > span.start)
        samples.append(replace(sample, rollout=replace(sample.rollout, spans=own)))
    return Batch(0, VERSION, tuple(samples))


@pytest.fixture(scope="module")
def exact(model: Path, batch: Batch) -> MismatchGap:
    """By transformers in float64, token by token."""
    student, gap = load_float64(model), MismatchGap()
    for sample in batch.samples:
        assert isinstance(sample, Sample)
        draws, versions_T = sample.rollout.draws, sample.rollout.versions_T()
        with torch.no_grad():
            logp_TV = response_logp(student, sample)
        for t, token in enumerate(sample.rollout.response_ids_T):
            if versions_T[t] != VERSION:
                continue
            learner, sampler = (
                float(logp_TV[t, int(token)]),
                float(draws.sampler_logp_N[draws.path_T[t]]),
            )
            r = min(math.exp(learner - sampler), MOST_RATIO)
            gap = gap.plus(
                MismatchGap(1, abs(math.exp(learner) - math.exp(sampler)), r - 1 - math.log(r))
            )
    assert 0 < gap.tokens < batch.num_response_tokens
    return gap


def bound(gap: MismatchGap, factor: float) -> Bound:
    """A limit of k3 at `factor` of what there is."""
    few = 1 + SMALL / gap.tokens
    return Bound(MismatchLimits(mean_abs_dp=1.0, mean_k3_nats=factor * gap.mean_k3_nats / few))


@pytest.fixture(scope="module")
def verdicts(
    model: Path, batch: Batch, exact: MismatchGap, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    base, found = tmp_path_factory.mktemp("verdicts"), {}
    for name, (size, parallel) in LAYOUTS.items():
        out = base / name.replace(" ", "-")
        config = {"parallel": parallel, "optimizer": ADAM, "max_tokens_per_microbatch": 64}
        bounds = {"refusing": bound(exact, 0.999), "allowing": bound(exact, 1.001)}
        run_world(bound_jobs.judge, size, out, model=model, config=config, batch=batch, **bounds)
        found[name] = [json.loads((out / f"verdict{r}.json").read_text()) for r in range(size)]
        found[name][0]["weights"] = load_file(out / "after" / "model.safetensors")
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_refuses_on_the_same_figures_which_are_those_of_own_tokens(
    name: str, verdicts: dict[str, list[dict[str, Any]]], exact: MismatchGap
):
    first, *others = (found["refused"] for found in verdicts[name])
    assert first is not None, "the job has also found the weights bitwise unchanged"
    assert all(other == first for other in others)
    assert first["tokens"] == exact.tokens
    for key, mine in (("abs_dp", exact.abs_dp), ("k3_nats", exact.k3_nats)):
        bounded("gap of an update against float64, relative", abs(first[key] / mine - 1), 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_within_its_bound_is_the_one_that_nobody_judged(
    name: str, verdicts: dict[str, list[dict[str, Any]]], model: Path, batch: Batch
):
    """A refusal before it has left no gradient behind."""
    metrics, weights = verdicts[name][0]["metrics"], verdicts[name][0]["weights"]
    oracle = oracle_update(model, batch, lr=ADAM["lr"], eps=ADAM["eps"], clip=ADAM["clip_grad"])
    assert metrics["loss"] == pytest.approx(oracle.loss, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-3)
    source = load_file(model / "model.safetensors")
    assert any(not torch.equal(weights[key], source[key]) for key in source)
