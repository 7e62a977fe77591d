"""What `python -m studies roofline` compares with, and that its controls can fail."""

from dataclasses import replace

import pytest

from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE
from studies import roofline
from studies.roofline.predict import Unstated, learner_of, predict, tokens_per_s
from studies.roofline.rows import NEMO, PublishedRun

H100 = CATALOGUE["h100"]
BY_NAME = {run.name: run for run in NEMO}
FIRST = NEMO[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_two_figures_of_a_published_run_agree(name: str) -> None:
    """Averages of five steps, which the page says differ a little; one differs more."""
    run = BY_NAME[name]
    speed = run.samples * run.mean / run.step_s / run.gpus
    off = 0.16 if name == "235B-A22B one step off, 256" else 0.05
    assert 1 - off < speed / run.tokens_per_s < 1


@pytest.mark.parametrize("run", NEMO, ids=lambda run: run.name)
def test_learners_use_all_gpus_that_train(run: PublishedRun) -> None:
    assert learner_of(run).parallel.world_size == run.trainers
    assert run.samplers % run.server_tp == 0


def test_phases_at_once_take_as_long_as_the_longer_one() -> None:
    turns = predict(FIRST, H100, ASSUMED, Unstated())
    together = replace(turns, takes_turns=False)
    trained_s = turns.train.seconds + turns.optimizer.seconds
    assert turns.seconds == turns.sample.seconds + trained_s + turns.refit.seconds
    assert together.seconds == max(turns.sample.seconds, trained_s) + turns.refit.seconds


def test_half_the_memory_bandwidth_slows_sampling_alone() -> None:
    half = replace(H100, hbm_gbs=H100.hbm_gbs / 2)
    before, after = (predict(FIRST, gpu, ASSUMED, Unstated()) for gpu in (H100, half))
    assert after.sample.memory_s == pytest.approx(2 * before.sample.memory_s)
    assert after.train.seconds == before.train.seconds
    assert tokens_per_s(FIRST, after) < 0.7 * tokens_per_s(FIRST, before)


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `failed` is about, without phases alone and examples."""
    monkeypatch.setattr(roofline, "SYNCS", ())
    monkeypatch.setattr(roofline, "EXAMPLES", {})


@pytest.mark.usefixtures("rows_alone")
def test_a_run_that_no_gpu_could_make_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roofline.measure()["failed"] == []
    wrong = replace(FIRST, tokens_per_s=5000)
    monkeypatch.setattr(roofline, "NEMO", (wrong,))
    assert roofline.measure()["failed"] == [f"{FIRST.name} is faster than ideal"]


@pytest.mark.usefixtures("rows_alone")
def test_a_control_that_changes_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = replace(H100, hbm_gbs=1e9)
    monkeypatch.setitem(roofline.CATALOGUE, "h100", endless)
    assert "half the memory bandwidth changes nothing" in roofline.measure()["failed"]


def test_training_alone_has_the_flops_that_its_publisher_counts() -> None:
    figures = roofline.training(roofline.TRAINING, H100)
    assert figures["flops_ratio"] == pytest.approx(1, abs=0.01)
    assert figures["predicted_tokens_per_s"] < H100.tflops * 1e12 * ASSUMED.train_mfu / 22.9e9


def test_an_example_s_phases_are_of_every_kind_of_gpu() -> None:
    phases = roofline.example("one_node", *roofline.EXAMPLES["one_node"])["phases"]
    assert set(phases) == {
        "decode step",
        "scoring pass",
        "mini-batch",
        "optimizer step",
        "weight sync",
    }
    for row in phases.values():
        assert row["b200"]["seconds"] <= row["h200"]["seconds"] <= row["h100"]["seconds"]
    assert phases["decode step"]["h200"]["memory"] < phases["decode step"]["h100"]["memory"]
    assert phases["mini-batch"]["h200"]["compute"] == phases["mini-batch"]["h100"]["compute"]
