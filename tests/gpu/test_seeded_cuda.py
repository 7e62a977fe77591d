"""The kernel of the seeded draw chooses on CUDA what SGLang's function chooses there."""

import importlib.util

import pytest
import torch

from sglang_bridge.server import seeded
from tests.support.figures import bounded
from tests.support.seeded_job import sglang_draw, sglang_hash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 151_936


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize(("vocab", "rows", "times"), [(1000, 4096, 240), (VOCAB, 256, 80)])
def test_ids_are_those_of_sglang(vocab: int, rows: int, times: int):
    """The same function not compiled: a million draws of few ids, twenty thousand of Qwen3's."""
    theirs = sglang_draw(sglang_hash().murmur_hash32)
    generator = torch.Generator("cuda").manual_seed(0)
    scale_B1 = torch.tensor([0.1, 1.0, 3.0, 10.0], device="cuda").repeat(rows // 4)[:, None]
    probs_BV = (
        torch.randn(rows, vocab, device="cuda", generator=generator).mul_(scale_B1).softmax(1)
    )
    probs_BV[::5] *= torch.rand(probs_BV[::5].shape, device="cuda", generator=generator) < 0.1
    logp_BV = probs_BV.log()
    numbers: dict[str, object] = {"device": "cuda", "generator": generator}
    for _ in range(times):
        seed_B = torch.randint(-(2**63), 2**63 - 1, (rows,), **numbers)
        position_B = torch.randint(0, 10**5, (rows,), **numbers)
        expected_B = theirs(logp_BV, seed_B, position_B)[:, 0]
        assert torch.equal(seeded.choose(probs_BV, seed_B, position_B), expected_B)


def test_nothing_of_the_size_of_the_probabilities_is_held():
    probs_BV = torch.rand(64, VOCAB, device="cuda")
    seed_B = torch.arange(64, device="cuda")
    seeded.choose(probs_BV, seed_B, seed_B)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seeded.choose(probs_BV, seed_B, seed_B)
    extra = torch.cuda.max_memory_allocated() - before
    bounded(
        "seeded draw on CUDA: extra bytes / bytes of probs", extra / (4 * probs_BV.numel()), 0.01
    )
