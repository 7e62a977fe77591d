"""Real learners send their shards to servers' ranks: each holds its slices, bit for bit."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.dist import shard_jobs
from tests.dist.layouts import LAYOUTS
from tests.dist.shard_jobs import Fleet
from tests.dist.worlds import run_world
from tests.support.models import tiny_glm4_moe, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

LEARNERS = ("one rank", "tp2", "pp2", "pp2 vpp2", "dp2 ep2", "tp2 ep2", "dp2", "cp2")
TP1, TP2, TP4, TP2_EP2, TP4_EP2 = (1, 1), (2, 1), (4, 1), (2, 2), (4, 2)
# "biased" has two KV heads: ranks of TP4 hold copies of them. Servers may differ from each other.
DENSE = [
    Fleet("tied", (TP1,), "float32"),
    Fleet("tied", (TP2, TP2), "bfloat16"),
    Fleet("biased", (TP1, TP1), "bfloat16"),
    Fleet("biased", (TP2,), "float32"),
    Fleet("biased", (TP4, TP1), "float32"),
]
MOE = [
    Fleet("moe", (TP2_EP2,), "float32"),
    Fleet("moe", (TP2_EP2, TP2_EP2), "bfloat16"),
    Fleet("moe", (TP1, TP4_EP2), "bfloat16"),
    Fleet("moe", (TP2,), "float32"),
    # its routers and their biases are float32 on servers of every dtype
    Fleet("glm", (TP2_EP2, TP1), "bfloat16"),
]
# columns of a matrix lie on two ranks, whose rows share a scale
ROUNDED = [
    Fleet("tied", (TP2,), "bfloat16", "int8"),
    Fleet("moe", (TP2_EP2, TP1), "float32", "int3"),
    Fleet("moe", (TP2,), "float32", "fp8"),
]
# numbers and scales; a rank of TP4_EP2 holds some columns of an expert, and all scales of its rows
QUANTISED = [
    Fleet("moe", (TP2_EP2, TP1), "bfloat16", quantization="int8"),
    Fleet("moe", (TP4_EP2, TP1), "float32", quantization="fp8", staging_bytes=60_000),
    Fleet("glm", (TP2_EP2,), "bfloat16", quantization="int8"),
]
QUANTISED_DENSE = [
    Fleet("tied", (TP2, TP1), "float32", quantization="int8", staging_bytes=40_000),
    Fleet("biased", (TP4,), "bfloat16", quantization="fp8"),
]
# into shadow buffers with room for some of the weights, and for all
STAGED = [
    Fleet("moe", (TP2_EP2, TP1), "float32", "fp8", staging_bytes=200_000),
    Fleet("moe", (TP2_EP2,), "bfloat16", staging_bytes=10_000_000),
]
# chains of two to five servers: of one layout among two, and where dense and expert tensors have
# replicas in other numbers
RELAYED = [
    Fleet("biased", (TP2, TP2, TP2), "float32", relay=True),
    Fleet("tied", (TP1,) * 5, "bfloat16", relay=True),
]
RELAYED_MOE = [
    Fleet("moe", (TP1, TP2_EP2, TP2_EP2, TP1, TP2_EP2), "bfloat16", relay=True),
    Fleet("moe", (TP2_EP2,) * 3, "float32", quantization="int8", staging_bytes=60_000, relay=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("shards")
    small = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 301}
    return {
        "tied": tiny_qwen3(base / "tied", seed=1, **small, tie_word_embeddings=True),
        "biased": tiny_qwen2(base / "biased", seed=2, **small),
        "glm": tiny_glm4_moe(base / "glm", seed=4, **small),
        # several KV groups on each of two ranks
        "moe": tiny_qwen3_moe(
            base / "moe",
            seed=3,
            **small,
            mlp_only_layers=[1],
            num_attention_heads=8,
            num_key_value_heads=4,
        ),
    }


def fleets_of(learner: str) -> list[Fleet]:
    """What a learner of this layout sends to."""
    return [
        *(DENSE if LAYOUTS[learner].dense else []),
        *MOE,
        *(ROUNDED if learner == "tp2" else []),
        *(STAGED if learner == "tp2 ep2" else []),
        *(QUANTISED if learner in ("one rank", "tp2", "tp2 ep2", "dp2 ep2") else []),
        *(RELAYED if learner in ("tp2", "dp2") else []),
        *(RELAYED_MOE if learner in ("tp2", "dp2 ep2") else []),
        *(QUANTISED_DENSE if learner in ("one rank", "tp2", "pp2 vpp2") else []),
    ]


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_server_rank_holds_its_slices(learner: str, models: dict[str, Path], tmp_path: Path):
    layout = LAYOUTS[learner]
    arguments = {"models": models, "parallel": layout.parallel, "fleets": fleets_of(learner)}
    run_world(shard_jobs.shards_to_fleets, layout.ranks, tmp_path, same_host="off", **arguments)


def test_ranks_that_share_key_value_heads_send_them(models: dict[str, Path], tmp_path: Path):
    """Four ranks and two heads: rows of q on one rank, the last of them, k and v on the next."""
    fleets = [*DENSE, *QUANTISED_DENSE]
    arguments = {"models": models, "parallel": {"tp": 4}, "fleets": fleets}
    run_world(shard_jobs.shards_to_fleets, 4, tmp_path, same_host="off", **arguments)


STAGED_CHAIN = Fleet("biased", (TP2,) * 3, "float32", staging_bytes=60_000, relay=True)


@pytest.mark.parametrize("learner", ["tp2", "tp2 ep2"])
def test_weights_that_stay_on_one_host_are_the_same(
    learner: str, models: dict[str, Path], tmp_path: Path
):
    """Bit for bit what went through the group: plain, rounded, quantised and staged."""
    layout = LAYOUTS[learner]
    arguments = {"models": models, "parallel": layout.parallel, "fleets": fleets_of(learner)}
    run_world(shard_jobs.shards_to_fleets, layout.ranks, tmp_path, same_host="auto", **arguments)


@pytest.mark.parametrize(
    ("learner", "fleet", "same_host"),
    [
        ("one rank", Fleet("biased", (TP1, TP1), "float32"), "off"),
        ("tp2", Fleet("biased", (TP1, TP1), "float32"), "off"),
        ("tp2", Fleet("biased", (TP1, TP1), "float32"), "auto"),
        ("tp2", Fleet("biased", (TP2, TP2, TP2), "float32", relay=True), "auto"),
        # one rank talks to the first server alone: it only fails once that one leaves the group
        ("one rank", Fleet("biased", (TP2,) * 3, "float32", relay=True), "auto"),
        (
            "one rank",
            Fleet("biased", (TP2,) * 3, "float32", staging_bytes=60_000, relay=True),
            "auto",
        ),
    ],
    ids=["one rank", "tp2", "one host", "in the middle", "behind the first", "behind, staged"],
)
def test_the_others_receive_without_a_server_that_was_lost(
    learner: str, fleet: Fleet, same_host: str, models: dict[str, Path], tmp_path: Path
):
    layout = LAYOUTS[learner]
    arguments = {"model": models["biased"], "parallel": layout.parallel, "fleet": fleet}
    arguments["same_host"] = same_host
    run_world(shard_jobs.shards_without_a_lost_server, layout.ranks, tmp_path, **arguments)


def test_updates_beside_weight_syncs_change_nothing_that_is_sent(
    models: dict[str, Path], tmp_path: Path
):
    """Bit for bit; also what is sent once more, when the learner has another version already."""
    fleets = [
        Fleet("biased", (TP1, TP2), "float32"),
        Fleet("moe", (TP1, TP2_EP2), "bfloat16", quantization="int8", staging_bytes=60_000),
        Fleet("tied", (TP1, TP2), "float32", "int8", staging_bytes=60_000),
        Fleet("biased", (TP1, TP1, TP1), "float32", staging_bytes=60_000, relay=True),
    ]
    layout = LAYOUTS["tp2"]
    arguments = {"models": models, "parallel": layout.parallel, "fleets": fleets}
    run_world(shard_jobs.shards_beside_training, layout.ranks, tmp_path, **arguments)


def test_every_pair_of_factors_is_among_them():
    """Any two of: learner, its model, a server's layout, number of servers, dtype."""
    wanted = {
        "learner": set(LEARNERS),
        "model": {"tied", "biased", "moe"},
        "server": {TP1, TP2, TP2_EP2},
        "servers": {1, 2},
        "dtype": {"float32", "bfloat16"},
    }
    runs = [
        {
            "learner": learner,
            "model": fleet.model,
            "server": server,
            "servers": len(fleet.servers),
            "dtype": fleet.dtype,
        }
        for learner in LEARNERS
        for fleet in fleets_of(learner)
        for server in fleet.servers
    ]
    for one, other in combinations(wanted, 2):
        found = {(run[one], run[other]) for run in runs}
        missing = {(a, b) for a in wanted[one] for b in wanted[other]} - found
        impossible = {
            (a, b)
            for a, b in missing
            if ("tied" in (a, b) or "biased" in (a, b))  # without experts
            and any(side in (TP2_EP2, "dp2 ep2", "tp2 ep2") for side in (a, b))
        }
        assert missing == impossible, (one, other)
