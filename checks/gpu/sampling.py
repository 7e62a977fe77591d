"""What draws cost a decode step, and scores a prefill, on logits alone, and how exact they are.

Decode: the operations of a server's step for B requests, beside the softmax and the single draw
that the sampler makes anyway (`sampler`; `seeded`: with rollout.seeded), the same with torch's
operations instead of kernels, and draws from whole probabilities (benchmarks/dense_draws.py).
Scores: the ids of L response rows as a teacher's forward pass scores them, beside the one pass over
the logits that they need. Exactness: against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks import dense_draws
from checks.gpu.timing import or_out_of_memory, timed
from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server import masses, seeded
from sglang_bridge.server.inversion import draw
from sglang_bridge.server.masses import masses_of
from sglang_bridge.server.rows import build_rows, forced
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.score_plan import ScorePlan
from sglang_bridge.server.scoring import RECORD, ScoreRecord, rows_of
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.text import to_text

REPEATS = 20
SUPPORTS = {"mc_1": (0, 1), "mc_16": (0, 16), "mc_64": (0, 64), "atoms_16_tail_48": (16, 48)}
IDS_A_ROW = 14  # distinct ids of 64 draws, as a real student keeps
EXACT_ROWS = 16


@dataclass(frozen=True)
class Size:
    """batch: B. rows: L, shown in chunks of `chunk` rows."""

    batch: int
    vocab: int
    rows: int
    chunk: int


FULL, DRY = Size(256, 151_936, 4096, 1024), Size(4, 8192, 32, 16)


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Milliseconds by operation, and errors."""
    size, device = (DRY, "cpu") if dry else (FULL, "cuda")
    logits_BV = 3 * torch.randn(size.batch, size.vocab, device=device)
    return {
        "batch": size.batch,
        "vocab": size.vocab,
        "kernels": masses.can_use_kernels(logits_BV),
        "errors": _errors(logits_BV[:EXACT_ROWS]),
        "decode_ms": _decode(logits_BV, device),
        "score_rows": size.rows,
        "score_ids": size.rows * IDS_A_ROW,
        "score_ms": _scores(size, device),
    }


def _errors(logits_BV: torch.Tensor) -> dict[str, float]:
    """Largest errors of log-probs (nats) and of numbers that chose draws (of the CDF)."""
    rows, device = len(logits_BV), logits_BV.device
    temperature_B1 = torch.full((rows, 1), 0.7, device=device)
    policy = behaviour(logits_BV, temperature_B1)
    found = masses_of(policy)
    uniform_BM = torch.rand(rows, 64, dtype=torch.float64, device=device)
    ids_BM = draw(policy, found, uniform_BM)
    logp_BV = (logits_BV.double() / temperature_B1.double()).log_softmax(-1)
    above_BM = logp_BV.exp().cumsum(-1).gather(1, ids_BM)
    below_BM = above_BM - logp_BV.exp().gather(1, ids_BM)
    outside_BM = torch.maximum(below_BM - uniform_BM, uniform_BM - above_BM)
    return {
        "logp_nats": float((found.norm.logp(logits_BV) - logp_BV).abs().max()),
        "number_from_its_interval": max(0.0, float(outside_BM.max())),
    }


def _decode(logits_BV: torch.Tensor, device: str) -> dict[str, Any]:
    rows = len(logits_BV)
    one_B1 = torch.ones(rows, 1, device=device)
    path_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    top_p_B = torch.full((rows,), 0.9, device=device)
    seed_B = torch.arange(rows, device=device)
    probs_BV = torch.softmax(logits_BV, -1)  # what the sampler leaves

    def sampler() -> None:
        torch.multinomial(torch.softmax(logits_BV, -1), 1)

    def seeded_sampler() -> None:
        seeded.choose(torch.softmax(logits_BV, -1), seed_B, seed_B)

    def uniform(draws: int) -> torch.Tensor:
        return torch.rand(rows, draws, dtype=torch.float64, device=device)

    def recorded(atoms: int, draws: int, top_p_B: torch.Tensor | None = None) -> None:
        wanted = Wanted(np.full(rows, atoms), np.full(rows, draws))
        policy = behaviour(logits_BV, one_B1, top_p_B=top_p_B)
        path = forced(path_B1, probs_BV.gather(1, path_B1).log())
        build_rows(select(policy, wanted, uniform(draws)), path)

    def dense() -> None:
        wanted = Wanted(np.full(rows, 0), np.full(rows, 64))
        dense_draws.recorded(logits_BV, one_B1, path_B1, wanted, uniform(64))

    calls = {"sampler": sampler, "seeded": seeded_sampler}
    calls |= {name: lambda a=a, m=m: recorded(a, m) for name, (a, m) in SUPPORTS.items()}
    calls["mc_64_top_p"] = lambda: recorded(0, 64, top_p_B)
    calls["mc_64_dense"] = dense
    calls["one_pass"] = lambda: masses_of(behaviour(logits_BV, one_B1))

    def measured(call: Callable[[], None]) -> dict[str, Any]:
        return or_out_of_memory(lambda: timed(call, device, REPEATS))

    with mock.patch.object(masses, "_has_triton", return_value=False):
        without_kernels = measured(calls["mc_64"])
    return {name: measured(call) for name, call in calls.items()} | {
        "mc_64_without_kernels": without_kernels
    }


def _scores(size: Size, device: str) -> dict[str, Any]:
    """Scores of one request of L rows, beside the pass over its logits alone."""
    logits_LV = 3 * torch.randn(size.chunk, size.vocab, device=device)
    one_B1 = torch.ones(1, 1, device=device)
    batch = SimpleNamespace(
        reqs=[_request(size)],
        prefix_lens=[0],
        extend_lens=[size.rows],
        extend_logprob_start_lens=[0],
    )
    rows, starts = rows_of(batch), range(0, size.rows, size.chunk)

    def scored() -> None:
        plan = ScorePlan(rows, torch.Generator(device=device))
        plan.begin(size.rows, torch.device(device))
        for _ in starts:
            plan.take(logits_LV)

    def one_pass() -> None:
        for _ in starts:
            masses_of(behaviour(logits_LV, one_B1))

    calls = {"scores": scored, "one_pass": one_pass}
    return {name: timed(call, device, REPEATS) for name, call in calls.items()}


def _request(size: Size) -> SimpleNamespace:
    """SGLang's request, as far as the plan reads it."""
    ids_N = np.random.default_rng(0).integers(0, size.vocab, size.rows * IDS_A_ROW)
    params = {
        wire.SCORE_RUNS: to_text(pack(np.array([1, size.rows + 1]))),
        wire.SCORE_LENGTHS: to_text(pack(np.full(size.rows, IDS_A_ROW))),
        wire.SCORE_IDS: to_text(pack(ids_N)),
    }
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params))
    setattr(request, RECORD, ScoreRecord(params))
    return request
