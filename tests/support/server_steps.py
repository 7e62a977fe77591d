"""What a server's hooks compute in a decode step and in a scoring pass, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_bridge import wire
from sglang_bridge.server import draws, masses
from sglang_bridge.server.compat import batches, ranks
from sglang_bridge.server.score_plan import ScorePlan
from sglang_bridge.server.scoring import rows_of
from tests.support.server_requests import fake_request, score_request, scoring_batch

VOCAB = 4500
"""Draws find their id by blocks, the last of which is not full."""
There = Callable[[torch.Tensor], torch.Tensor]
WANTED: dict[str, dict[str, Any]] = {
    "paths alone": {"num_draws": 0},
    "draws": {"num_draws": 9},
    "thin draws": {"num_draws": 9, "thin": True},
    "atoms": {"num_atoms": 5, "num_draws": 0},
    "atoms and draws": {"num_atoms": 5, "num_draws": 9},
    "top-p": {"num_draws": 9, "top_p": 0.9},
    "deterministic": {"num_draws": 9, "deterministic": True},
}


def decode_step(
    there: There,
    *,
    num_draws: int,
    num_atoms: int = 0,
    thin: bool = False,
    top_p: float | None = None,
    deterministic: bool = False,
) -> dict[str, torch.Tensor]:
    """Two requests, one of which wants ids besides its path's; what comes to the host.

    there: brings a tensor to the device.
    """
    wanted = {wire.NUM_DRAWS: num_draws, wire.NUM_ATOMS: num_atoms, wire.THIN: thin}
    requests = [fake_request(**{wire.NUM_DRAWS: 0}), fake_request(**wanted)]
    cut = None if top_p is None else there(torch.full((2,), top_p))
    filters = {"top_k_B": None, "top_p_B": cut, "min_p_B": None}
    with (
        mock.patch.object(ranks, "is_deterministic", return_value=deterministic),
        mock.patch.object(ranks, "weight_version", return_value="3"),
        mock.patch.object(batches, "sampling_filters", return_value=filters),
        mock.patch.object(batches, "seed_of", return_value=5),
        mock.patch.object(batches, "next_positions", return_value=[7, 8]),
        mock.patch.object(masses, "_has_triton", return_value=False),
    ):
        return _observed(there, requests)


def _observed(there: There, requests: list[SimpleNamespace]) -> dict[str, torch.Tensor]:
    logits_BV = there(3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4)))
    info = SimpleNamespace(temperatures=there(torch.tensor([[0.7], [1.3]])))
    observer = draws.DrawObserver("cpu", 0)  # its generator's numbers
    with draws.sampling_step(draws.step_of(SimpleNamespace(reqs=requests))):
        state = observer.before_grammar(logits_BV, info)
        draws.show_probabilities((logits_BV / info.temperatures).softmax(-1))
        rows = observer.after_sample(state, there(torch.tensor([1, 2])))
    return rows.copy_to_host(_as_sglang_copies).tensors


def scoring_pass(there: There) -> dict[str, torch.Tensor]:
    """A pass over two requests, one of which also wants the teacher's own ids, in two chunks."""
    own = {wire.SCORE_ATOMS: 4, wire.SCORE_DRAWS: 6, wire.SCORE_TEMPERATURE: 2.0}
    requests = [score_request(3, [1, 2], [5, 6, 7], **own), score_request(2, [1, 1], [1, 2])]
    rows = rows_of(scoring_batch(requests, [0, 0], [5, 4], [3, 2]))
    logits_LV = there(3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)))
    with (
        mock.patch.object(ranks, "is_deterministic", return_value=False),
        mock.patch.object(masses, "_has_triton", return_value=False),
    ):
        plan = ScorePlan(rows, torch.Generator().manual_seed(7))
        plan.begin(len(logits_LV), logits_LV.device)
        for chunk in logits_LV.split(3):
            plan.take(chunk)
        found = plan.copy_to_host(_as_sglang_copies)
    return {"logp_K": found.logp_K, **found.selections.tensors}


_as_sglang_copies = partial(torch.Tensor.to, device="cpu", non_blocking=True)
