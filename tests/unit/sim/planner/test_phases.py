"""What each phase of a run takes on one of its GPUs."""

from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.sim.costs import SyncCost
from megatron_opd.sim.planner.phases import (
    AverageSample,
    RunPhase,
    run_phases,
    running_requests,
)
from megatron_opd.sizing.flops import Work, train_flops
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE
from tests.support.config_files import minimal
from tests.support.published import spec_of

STUDENT, TEACHER = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")
SAMPLE = AverageSample(prompt=200, response=1800, running=10)
PASS_SAMPLES = 16_384 // 2000


def config_of(**sections: Any) -> Config:
    given: dict[str, Any] = {
        "student": {"model": "s", "gpu_memory_gib": 80.0},
        "teacher": {"model": "t"},
        "learner": {"dtype": "bfloat16", "num_mini_batches": 2},
        "buffer": {"batch_size": 16},
    }
    return minimal(**given | sections)


def phases(config: Config) -> dict[str, RunPhase]:
    sync = SyncCost(sync_s=0.4, paused_s=0.3)
    return run_phases(config, (STUDENT, TEACHER), SAMPLE, sync, CATALOGUE["h100"])


def test_each_phase_is_that_of_its_samples() -> None:
    found = phases(config_of())
    # 10 requests with a prompt and half of a response in the cache
    read = found["decode step"].work.hbm_bytes
    assert read == 2 * 1_720_574_976 + 10 * (200 + 900) * 2 * 28 * 8 * 128 * 2
    assert found["decode step"].time.fixed_s == ASSUMED.decode_step_s
    assert found["mini-batch"].work.flops == train_flops(STUDENT, Work.of([(200, 1800)] * 8))
    alone = train_flops(TEACHER, Work.of([(200, 1800)])) / 3
    assert found["scoring pass"].work.flops == pytest.approx(PASS_SAMPLES * alone)
    assert found["weight sync"].time.seconds == pytest.approx(0.4)


def test_the_rank_with_most_samples_counts_and_a_pipeline_idles() -> None:
    one = phases(config_of())["mini-batch"]
    three = phases(config_of(learner={"dtype": "bfloat16", "parallel": {"dp": 3}}))["mini-batch"]
    # of 16 samples 6 against 8
    assert three.time.compute_s == pytest.approx(one.time.compute_s * 6 / 8)
    tree = {"dtype": "bfloat16", "num_mini_batches": 2, "max_tokens_per_microbatch": 2048}
    lengths = {"lengths": {"mean": 1800, "prompt_tokens": 200}}
    staged = config_of(learner=tree | {"parallel": {"pp": 2}}, simulation=lengths)
    # eight micro-batches: half of the work, and an eighth of it idle
    expected = one.time.compute_s / 2 * (1 + 1 / 8)
    assert phases(staged)["mini-batch"].time.compute_s == pytest.approx(expected)


def test_a_server_decodes_what_it_is_sent_and_has_room_for() -> None:
    student = {"model": "s", "gpu_memory_gib": 80.0, "max_running_requests": 300}
    many = config_of(student=student, rollout={"concurrency": 1000})
    assert running_requests(many, STUDENT, 100) == 300
    # 0.8 of 80 GiB without the weights, at 112 KiB a token
    room = (0.8 * 80 * 2**30 - 2 * 1_720_574_976) / (112 * 1024)
    assert running_requests(many, STUDENT, 10_000) == pytest.approx(room / 10_000, rel=1e-4)
    few = config_of(student=student | {"servers": 4}, rollout={"concurrency": 100})
    assert running_requests(few, STUDENT, 100) == 25
