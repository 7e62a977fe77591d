"""Each rank is sent what its pipeline stage reads, and all agree when one refuses its part."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.records.types import Batch
from tests.dist import reading_jobs
from tests.dist.caches import make_batch, random_experts, random_gates, with_experts, with_gates
from tests.dist.reading_jobs import DAMAGES
from tests.dist.worlds import run_world
from tests.support.models import tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

VOCAB, LAYERS, EXPERTS, TOPK = 512, 3, 8, 3
REPLAY = {"routing_replay": "rollout", "routing_weights": "sampler"}
# layers without experts come first: a stage may have none
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, REPLAY),
    "tp2": (2, {"parallel": {"tp": 2}, **REPLAY}),
    "pp4": (4, {"parallel": {"pp": 4}, **REPLAY}),
    "pp2 vpp2": (2, {"parallel": {"pp": 2, "vpp": 2}, **REPLAY}),
    "tp2 pp2": (4, {"parallel": {"tp": 2, "pp": 2}, "routing_replay": "rollout"}),
    "pp2, no replay": (2, {"parallel": {"pp": 2}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(
        tmp_path_factory.mktemp("model") / "moe",
        seed=4,
        num_hidden_layers=4,
        mlp_only_layers=[0],
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
    )


@pytest.fixture(scope="module")
def batch(model: Path) -> Batch:
    plain = make_batch(model, samples=4, seed=7, vocab=VOCAB)
    routed = with_experts(plain, random_experts(plain, 11, (LAYERS, EXPERTS, TOPK)))
    return with_gates(routed, random_gates(plain, 12, (LAYERS, TOPK)))


def read(
    model: Path, batch: Batch, out: Path, ranks: int, config: dict[str, Any], damages: bool = False
) -> list[dict[str, Any]]:
    """What each rank got; the job itself compares every column with the whole share's."""
    arguments = {"model": model, "config": config, "batch": batch, "damages": damages}
    return run_world(reading_jobs.read, ranks, out, **arguments)["ranks"]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_gets_what_its_stage_reads_and_nothing_else(name, model, batch, tmp_path):
    ranks, config = CASES[name]
    rows = read(model, batch, tmp_path, ranks, config)
    last = max(row["stage"] for row in rows)
    for row in rows:
        assert row["cache"] == (row["stage"] == last)
        assert (row["cache_bytes"] > 0) == (row["stage"] == last)
    whole = rows[0]["whole_experts_bytes"]
    by_stage = {row["stage"]: row["experts_bytes"] for row in rows}
    assert whole > 0
    assert sum(by_stage.values()) == (whole if "routing_replay" in config else 0)
    if name == "pp4":
        assert [by_stage[stage] for stage in range(4)] == [0, whole / 3, whole / 3, whole / 3]


def test_a_share_of_a_model_without_experts(tmp_path):
    model = tiny_qwen3(tmp_path / "dense", seed=3)
    batch = make_batch(model, samples=4, seed=8, vocab=VOCAB)
    first, last = read(model, batch, tmp_path / "out", 2, {"parallel": {"pp": 2}})
    assert last["bytes"] == last["whole_bytes"] == first["whole_bytes"]
    assert first["bytes"] == last["bytes"] - last["cache_bytes"]


WORDS = {
    "cached ids": "sample 1: count_T is not that of 2 cached ids",
    "tokens": "sample 1: each of 1 sequences must have a run",
    "an expert of the first layer": "column experts_XLk must be in 0..7, got 0..255",
    "an expert of the last layer": "column experts_XLk must be in 0..7, got 0..255",
    "one expert twice": "routed experts of a token must differ, got one twice",
    "the kind of experts": "sample 1: routed experts must be of 3 layers, got 1",
    "number of frames": "a share has 1 frame and 4 a sequence, got ",
    "no frames": "a share has 1 frame and 4 a sequence, got 0",
    "collected": "these samples do not fit",
    "lacking": "nothing",
}


@pytest.mark.parametrize("parallel", [{"pp": 2, "dp": 2}, {"tp": 2}])
def test_what_one_rank_refuses_no_rank_trains_on(parallel, model, batch, tmp_path):
    """Of one model copy alone; afterwards every rank reads the next share as ever."""
    assert WORDS.keys() == DAMAGES.keys()
    ranks = 4 if "dp" in parallel else 2
    rows = read(model, batch, tmp_path, ranks, {"parallel": parallel, **REPLAY}, damages=True)
    for name, words in WORDS.items():
        said = {row["said"][name] for row in rows}
        assert len(said) == 1, (name, said)
        assert said.pop().startswith(words), name
