"""What draws cost a decode step, and scores a prefill, on logits alone.

Decode: the operations of a server's step for B requests, beside the softmax and the single draw
that the sampler makes anyway. Scores: the ids of L response rows as a teacher's forward pass scores
them; with SGLang's kernel for the normaliser where SGLang is installed, else with torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.timing import or_out_of_memory, timed
from sglang_bridge import wire
from sglang_bridge.arrays import pack
from sglang_bridge.server import compat
from sglang_bridge.server.rows import build_rows
from sglang_bridge.server.sampling import behaviour
from sglang_bridge.server.score_plan import ScorePlan
from sglang_bridge.server.scoring import RECORD, ScoreRecord
from sglang_bridge.server.selection import Wanted, select
from sglang_bridge.server.text import to_text

REPEATS = 20
SUPPORTS = {"mc_1": (0, 1), "mc_16": (0, 16), "mc_64": (0, 64), "atoms_16_tail_48": (16, 48)}
IDS_A_ROW = 14  # distinct ids of 64 draws, as a real student keeps


@dataclass(frozen=True)
class Size:
    """batch: B. rows: L, shown in chunks of `chunk` rows."""

    batch: int
    vocab: int
    rows: int
    chunk: int


FULL, DRY = Size(256, 151_936, 4096, 1024), Size(4, 8192, 32, 16)


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Milliseconds by operation."""
    size, device = (DRY, "cpu") if dry else (FULL, "cuda")
    logits_BV = 3 * torch.randn(size.batch, size.vocab, device=device)
    return {
        "batch": size.batch,
        "vocab": size.vocab,
        "decode_ms": _decode(logits_BV, device),
        "score_rows": size.rows,
        "score_ids": size.rows * IDS_A_ROW,
        "score_ms": _scores(size, device),
        "normaliser": "SGLang's" if find_spec("sglang") else "torch's: sglang is not installed",
    }


def _decode(logits_BV: torch.Tensor, device: str) -> dict[str, Any]:
    rows = len(logits_BV)
    one_B1 = torch.ones(rows, 1, device=device)
    path_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    top_p_B = torch.full((rows,), 0.9, device=device)

    def sampler() -> None:
        torch.multinomial(torch.softmax(logits_BV, -1), 1)

    def recorded(atoms: int, draws: int, top_p_B: torch.Tensor | None = None) -> None:
        wanted = Wanted(np.full(rows, atoms), np.full(rows, draws))
        policy = behaviour(logits_BV, one_B1, top_p_B=top_p_B)
        uniform_BM = torch.rand(rows, wanted.max_draws, dtype=torch.float64, device=device)
        build_rows(select(policy, wanted, uniform_BM), path_B1).logp(policy)

    calls = {"sampler": sampler}
    calls |= {name: lambda a=a, m=m: recorded(a, m) for name, (a, m) in SUPPORTS.items()}
    calls["mc_64_top_p"] = lambda: recorded(0, 64, top_p_B)
    return {
        name: or_out_of_memory(lambda call=call: timed(call, device, REPEATS))
        for name, call in calls.items()
    }


def _scores(size: Size, device: str) -> dict[str, Any]:
    """Scores of one request of L rows, beside the normaliser alone."""
    if find_spec("sglang") is None:
        compat.row_log_normaliser = _torch_normaliser
    logits_LV = 3 * torch.randn(size.chunk, size.vocab, device=device)
    batch = SimpleNamespace(
        reqs=[_request(size)],
        prefix_lens=[0],
        extend_lens=[size.rows],
        extend_logprob_start_lens=[0],
    )
    starts = range(0, size.rows, size.chunk)

    def scored() -> None:
        plan = ScorePlan(batch, torch.Generator(device=device))
        plan.begin(size.rows, torch.device(device))
        for _ in starts:
            plan.take(logits_LV)

    def normaliser() -> None:
        for _ in starts:
            compat.row_log_normaliser(logits_LV)

    calls = {"scores": scored, "normaliser": normaliser}
    return {name: timed(call, device, REPEATS) for name, call in calls.items()}


def _torch_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top_L = logits.amax(-1)
    return top_L, torch.logsumexp(logits - top_L[:, None], -1)


def _request(size: Size) -> SimpleNamespace:
    """SGLang's request, as far as the plan reads it."""
    ids_N = np.random.default_rng(0).integers(0, size.vocab, size.rows * IDS_A_ROW)
    params = {
        wire.SCORE_START: 0,
        wire.SCORE_LENGTHS: to_text(pack(np.full(size.rows, IDS_A_ROW))),
        wire.SCORE_IDS: to_text(pack(ids_N)),
    }
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params))
    setattr(request, RECORD, ScoreRecord(params))
    return request
