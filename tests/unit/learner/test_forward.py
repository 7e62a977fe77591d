"""A micro-batch of the last stage: it waits for the device at most twice, usually once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_opd.learner.routing import MicroRouting
from megatron_opd.losses import lean
from megatron_opd.losses.fused import KernelShape, fused_passes, place_sums
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.ratios import NUM_BINS
from tests.support.fake_card import CARD, FakeCard, on_card
from tests.support.loss_cases import estimator
from tests.support.micro_syncs import OBJECTIVES, alone, batch, update


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without process groups."""
    alone(monkeypatch)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("some_left_out", [False, True])
def test_a_micro_batch_waits_once_for_the_bounds_of_its_blocks(name: str, some_left_out: bool):
    """And with Triton's kernels never: see below."""
    found = update(estimator(**OBJECTIVES[name]), batch(some_left_out=some_left_out), CARD)
    assert found.update == Counter({"_to_copy": 1})
    assert not found.packing
    once = Counter({"_to_copy": 1})
    assert found.limits == (once if name.startswith("m2po") else Counter())


def test_a_context_parallel_rank_knows_its_own_pairs_without_waiting():
    found = update(estimator(), batch(), CARD, in_context=True)
    assert found.update == Counter({"_to_copy": 1})


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("some_left_out", [False, True])
def test_what_is_computed_there_is_what_is_computed_here(name: str, some_left_out: bool):
    est, share = estimator(**OBJECTIVES[name]), batch(some_left_out=some_left_out)
    there, here = update(est, share, CARD), update(est, share, torch.device("cpu"))
    assert there.loss == pytest.approx(here.loss, rel=1e-5)
    torch.testing.assert_close(there.hidden_grad, here.hidden_grad, rtol=1e-4, atol=1e-6)
    for values in ("sums", "maxima"):
        found, expected = getattr(there.totals, values), getattr(here.totals, values)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert abs(here.loss) > 1e-6
    assert not here.update


@pytest.mark.parametrize("owner", ["student", "teacher"])
def test_pairs_without_weight_are_in_no_ratio(owner: str):
    """Of a teacher's support only the path is compared; elsewhere the sampler has no log-prob."""
    share = batch()
    row_N = np.repeat(np.arange(len(share.count_T)), share.count_T)
    on_path = np.isin(np.arange(len(row_N)), share.path_T)
    used = share.weight_N > 0 if owner == "student" else on_path
    assert 0 < used.sum() < len(used)
    share.sampler_logp_N[used] += 100.0
    share.sampler_logp_N[~used] = -1000.0 if owner == "student" else np.nan
    name = "opd" if owner == "student" else "teacher_topk"
    totals = update(estimator(**OBJECTIVES[name]), share, torch.device("cpu")).totals
    assert -130 < totals.max("log_ratio") < -70
    weight = share.weight_N[used].sum() if owner == "student" else used.sum()
    assert float(totals.sums[-NUM_BINS:].sum()) == pytest.approx(float(weight))


def test_what_torch_does_for_kernels_waits_for_nothing():
    row_N, id_N = (on_card(torch.randint(0, 9, (50,))) for _ in range(2))
    head, grad_N = HeadSlice(torch.zeros(9, 1)), on_card(torch.rand(50))
    with FakeCard() as seen:
        fused_passes(9, head, row_N, id_N, KernelShape(), kernels=lean)
        place_sums(row_N * 9 + id_N, grad_N)
    assert not seen.waits


def test_what_moved_is_counted_without_waiting():
    with FakeCard() as seen:
        real_m = torch.ones(4, dtype=torch.bool).to(CARD, non_blocking=True)
        real_m = real_m & (torch.arange(4, device=CARD) < 3)
        own = torch.arange(8, device=CARD).view(4, 2)
        given_mk = torch.where(torch.arange(4, device=CARD)[:, None] == 1, own + 2, own).short()
        routing = MicroRouting(dict.fromkeys(range(3), given_mk), real_m)
        assert MicroRouting({}, real_m).counts().shape == (4,)
        for layer in range(3):
            routing.experts(layer, own)
        counts = routing.counts()
    assert not seen.waits
    assert counts.cpu().tolist() == [3, 9, 6, 18], "a position in three layers, both choices"


class _Refuses(TorchDispatchMode):
    """Raises what CUDA raises under deterministic algorithms, of what a loss may come to use."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
        refused = {
            "cumsum": name == "cumsum" and args[0].is_floating_point(),
            "bincount": len(args) > 1 or "weights" in kwargs,
            "scatter_reduce": "prod" in args,
            **dict.fromkeys(("histc", "kthvalue", "median", "put"), True),
        }
        if refused.get(name):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_uses_what_deterministic_algorithms_refuse(name: str):
    with _Refuses():
        update(estimator(**OBJECTIVES[name]), batch(some_left_out=True), torch.device("cpu"))


def test_what_is_refused_is_seen():
    with _Refuses():
        torch.ones(3, dtype=torch.int64).cumsum(0)
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.ones(3).cumsum(0)
