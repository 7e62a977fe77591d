"""Real learners write versions to a directory: ranks of servers read their slices, bit for bit."""

from pathlib import Path

import pytest

from tests.dist import disk_jobs
from tests.dist.layouts import LAYOUTS
from tests.dist.shard_jobs import Fleet
from tests.dist.worlds import run_world
from tests.support.models import tiny_glm4_moe, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe

pytestmark = pytest.mark.dist

LEARNERS = ("tp2", "pp2 vpp2", "dp2 ep2", "tp2 ep2")
TP1, TP2, TP4, TP2_EP2, TP4_EP2 = (1, 1), (2, 1), (4, 1), (2, 2), (4, 2)
# "biased" has two KV heads: ranks of TP4 hold copies of them. int8: columns lie on two ranks
DENSE = [
    Fleet("tied", (TP2, TP1), "bfloat16", "int8"),
    Fleet("biased", (TP4, TP1), "float32", staging_bytes=30_000),
]
MOE = [
    Fleet("moe", (TP2_EP2, TP1), "bfloat16", staging_bytes=10_000_000),
    Fleet("moe", (TP2, TP4_EP2), "float32"),
    Fleet("glm", (TP2,), "bfloat16"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("disk")
    small = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 301}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return {
        "tied": tiny_qwen3(base / "tied", seed=1, **small, tie_word_embeddings=True),
        "biased": tiny_qwen2(base / "biased", seed=2, **small),
        "glm": tiny_glm4_moe(base / "glm", seed=4, **small),
        "moe": tiny_qwen3_moe(base / "moe", seed=3, **small, mlp_only_layers=[1], **heads),
    }


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_server_rank_reads_its_slices(learner: str, models: dict[str, Path], tmp_path: Path):
    """Whole and as changes, staged and not, rounded, and after a restart from the chain."""
    layout = LAYOUTS[learner]
    fleets = [*(DENSE if layout.dense else []), *MOE]
    arguments = {"models": models, "parallel": layout.parallel, "fleets": fleets}
    run_world(disk_jobs.disk_to_fleets, layout.ranks, tmp_path, **arguments)
    assert list((tmp_path / "weights").iterdir()) == [], "a learner that ends leaves nothing"
