"""A roofline by hand: units, halves and doubles, and what rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.sim.hardware import engine_cost
from megatron_opd.sizing.exchanges import Exchange
from megatron_opd.sizing.flops import Work, forward_flops, train_flops
from megatron_opd.sizing.gpus import ASSUMED, CATALOGUE, IDEAL, Efficiencies, Hardware
from megatron_opd.sizing.roofline import (
    PhaseTime,
    PhaseWork,
    decode_work,
    optimizer_work,
    phase_time,
    prefill_work,
    train_work,
)
from tests.support.published import spec_of

DENSE, MOE = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")
# one TFLOP/s, one GB/s of everything
UNIT = Hardware(1.0, 1.0, 80.0, 1.0, 1.0)
HALF = Efficiencies(0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.25, 0.125)
WORK = Work.of([(100, 900)] * 8)


def server(tp: int = 1) -> ServerConfig:
    return ServerConfig(model=Path("unused"), tp=tp)


def learner(**tree: Any) -> LearnerConfig:
    return LearnerConfig.model_validate({"dtype": "bfloat16", "recompute": "none"} | tree)


def test_seconds_are_work_over_the_share_of_the_data_sheet() -> None:
    local, far = Exchange("tp", 2, 2, 6e9, 4), Exchange("dp x cp", 16, 16, 16e9, 8)
    time = phase_time(PhaseWork(3e12, 2e9, (local, far)), UNIT, 0.75, HALF, fixed_s=7.0)
    # 6e9 / 2 sent at half a GB/s, four calls; 16e9 * 15 / 16, eight calls
    assert time == PhaseTime(
        compute_s=4.0, memory_s=4.0, node_s=6.0 + 1.0, network_s=30.0 + 1.0, fixed_s=7.0
    )
    assert time.seconds == 4.0 + 7.0 + 31.0 + 7.0
    assert time.ruled_by == "network"


@pytest.mark.parametrize(
    ("flops", "read", "seconds", "ruled_by"),
    [(3e12, 1e9, 3.0, "compute"), (1e12, 3e9, 3.0, "memory")],
)
def test_arithmetic_and_memory_overlap(
    flops: float, read: float, seconds: float, ruled_by: str
) -> None:
    time = phase_time(PhaseWork(flops, read), UNIT, 1.0, IDEAL)
    assert (time.seconds, time.ruled_by) == (seconds, ruled_by)


def test_half_of_one_figure_doubles_its_term_alone() -> None:
    work = decode_work(DENSE, server(tp=2), 64, 64_000)
    h100 = CATALOGUE["h100"]
    before = phase_time(work, h100, 0.5, IDEAL)
    halves = {
        "compute": replace(h100, tflops=h100.tflops / 2),
        "memory": replace(h100, hbm_gbs=h100.hbm_gbs / 2),
        "NVLink": replace(h100, node_gbs=h100.node_gbs / 2),
        "network": replace(h100, network_gbs=h100.network_gbs / 2),
    }
    for name, gpu in halves.items():
        expected = before.terms | {name: 2 * before.terms[name]}
        assert phase_time(work, gpu, 0.5, IDEAL).terms == pytest.approx(expected)


def test_a_decode_step_reads_weights_and_cache_and_computes_a_token_each() -> None:
    work = decode_work(DENSE, server(), requests=10, cached_tokens=5000)
    weights = 2 * 1_720_574_976  # the table of embeddings is the head
    assert work.hbm_bytes == weights + 5000 * 2 * 28 * 8 * 128 * 2
    matrices = 1_720_574_976 - (28 * (2 * 2048 + 2 * 128) + 2048)  # all but norms
    assert work.flops == 10 * 2 * matrices + 5000 * 2 * 28 * 16 * 256
    assert work.exchanges == ()


def test_ranks_of_a_server_share_work_and_reduce_twice_a_layer() -> None:
    one, two = (decode_work(DENSE, server(tp), 10, 5000) for tp in (1, 2))
    assert two.flops == one.flops / 2
    assert two.hbm_bytes == pytest.approx(one.hbm_bytes / 2, rel=1e-3)  # norms are on both
    reduced, gathered = two.exchanges
    assert (reduced.sent, reduced.calls) == ((2 * 28 + 1) * 10 * 2 * 2048, 57)
    assert gathered.sent == 10 * 151_936 * 2 / 2


def test_scoring_computes_a_forward_pass() -> None:
    for spec in (DENSE, MOE):
        assert prefill_work(spec, server(), WORK).flops == forward_flops(spec, WORK)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "pp": 2}, {"dp": 8, "ep": 8}, {"cp": 2, "dp": 4}])
def test_a_replicas_ranks_share_the_flops_of_training(sizes: dict[str, int]) -> None:
    config = learner(parallel=sizes)
    ranks = config.parallel.world_size / config.parallel.dp
    work = train_work(MOE, config, WORK, micro_batches=4)
    assert work.flops * ranks == train_flops(MOE, WORK)
    more = train_work(MOE, config, WORK, micro_batches=4, passes=2)
    assert more.flops * ranks == train_flops(MOE, WORK) + 2 * forward_flops(MOE, WORK)
    again = train_work(MOE, learner(parallel=sizes, recompute="full"), WORK, micro_batches=4)
    head = 2 * MOE.hidden_size * MOE.vocab_size * WORK.scored
    assert again.flops * ranks == train_flops(MOE, WORK) + forward_flops(MOE, WORK) - head


def test_smaller_micro_batches_read_the_weights_more_often() -> None:
    few, many = (train_work(DENSE, learner(), WORK, micros) for micros in (2, 8))
    # bfloat16 weights forward and backward, float32 gradients read and written
    assert many.hbm_bytes - few.hbm_bytes == pytest.approx(6 * 1_720_574_976 * 12, rel=1e-3)
    assert many.flops == few.flops


def test_an_optimizer_step_is_shared_by_replicas() -> None:
    one, four = (optimizer_work(DENSE, learner(parallel={"dp": dp})) for dp in (1, 4))
    assert one == PhaseWork(0.0, 30 * 1_720_574_976)
    assert four.hbm_bytes == one.hbm_bytes / 4
    (exchange,) = four.exchanges
    assert exchange.sent == 6 * 1_720_574_976 * 3 / 4


@pytest.mark.parametrize("tp", [1, 2])
def test_simulated_servers_take_the_roofline_s_terms_one_after_the_other(tp: int) -> None:
    requests, cached, gpu = 100, 200_000, CATALOGUE["h100"]
    section = server(tp)
    work = decode_work(DENSE, section, requests, cached)
    time = phase_time(work, gpu, ASSUMED.decode_mfu, ASSUMED, ASSUMED.decode_step_s)
    cost = engine_cost(DENSE, section, gpu)
    step_s = cost.step_s + requests * cost.step_request_s + cached * cost.step_cached_token_s
    # attention's arithmetic hides behind the cache that it reads
    hidden_s = cached * 2 * 28 * 16 * 256 / tp / (gpu.tflops * 1e12 * ASSUMED.decode_mfu)
    assert step_s + hidden_s == pytest.approx(sum(time.terms.values()))


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_nothing_beats_the_whole_data_sheet(gpu: Any) -> None:
    config = learner(parallel={"tp": 2, "dp": 8, "ep": 8})
    for work in (decode_work(MOE, server(2), 64, 64_000), train_work(MOE, config, WORK, 4)):
        assumed = phase_time(work, CATALOGUE[gpu], ASSUMED.train_mfu, ASSUMED)
        ideal = phase_time(work, CATALOGUE[gpu], IDEAL.train_mfu, IDEAL)
        assert ideal.seconds < assumed.seconds
