"""CUDA's own count of what a micro-batch waits for is the one that the made-up device gives."""

from __future__ import annotations

import warnings
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.fake_card import CARD
from tests.support.loss_cases import estimator
from tests.support.micro_syncs import OBJECTIVES, alone, batch, update

TOLD = "called a synchronizing CUDA operation"


class Told:
    """Counts the warnings of torch.cuda.set_sync_debug_mode while entered."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self._catching = warnings.catch_warnings(record=True)

    def __enter__(self) -> Told:
        self._seen: Any = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(*raised)
        self.waits[TOLD] += sum(TOLD in str(warning.message) for warning in self._seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_cuda_counts_no_more_waits(monkeypatch: pytest.MonkeyPatch, name: str):
    alone(monkeypatch)
    cuda, est, share = torch.device("cuda", 0), estimator(**OBJECTIVES[name]), batch()
    update(est, share, cuda, counter=Told)  # kernels are compiled, memory is pinned
    with Told() as control:
        float(torch.ones((), device=cuda))
    assert control.waits[TOLD] == 1
    found, expected = update(est, share, cuda, counter=Told), update(est, share, CARD)
    fused = find_spec("triton") is not None
    assert found.packing[TOLD] == 0
    assert found.update[TOLD] == (0 if fused else expected.update.total())
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
