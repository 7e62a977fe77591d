"""What is asked of real servers, and what their replies are compared with."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_opd.data.end_tokens import read_end_tokens
from megatron_opd.errors import UserError
from megatron_opd.inputs.models import check_ends
from sglang_bridge.client import ServerClient
from sglang_bridge.protocol import (
    RolloutReply,
    RolloutRequest,
    ScoreReply,
    ScoreRequest,
    ServerEnds,
    ServerInfo,
)
from sglang_bridge.server.launch import ServerProcess
from tests.support.figures import bounded
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import log_softmax, reference_logits, selection_error

NEAR_TIE = 1e-4  # routers closer than this between the last chosen and the next may differ
SCORES = "teacher scores against transformers (nats)"
TOLERANCE = 1e-5


def requests_of(tokens: int, count: int = 24) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            exact=True,
            rid=f"kept-{tokens}-{i}",
            input_ids=list(range(2 + i, 30 + i)),
            max_new_tokens=tokens,
            num_atoms=4,
            num_draws=8,
        )
        for i in range(count)
    ]


def generate_all(url: str, requests: list[RolloutRequest]) -> list[RolloutReply]:
    """All replies, asked for at once."""

    async def run() -> list[RolloutReply]:
        async with ServerClient(url, timeout_s=120) as client:
            return await asyncio.gather(*map(client.generate, requests))

    return asyncio.run(run())


def ends_read_back(server: ServerProcess, model: Path) -> ServerEnds:
    """What a server says that it ends at, once a run was seen to take that, and nothing else."""
    key = f"{server.spec.role}.model"

    async def ask() -> ServerInfo:
        async with ServerClient(server.url, timeout_s=120) as client:
            return await client.info()

    raw = json.loads((model / "config.json").read_text())
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ours, info = read_end_tokens(model, raw, raw["vocab_size"], tokenizer), asyncio.run(ask())
    check_ends(key, info, ours)
    with pytest.raises(UserError, match="must end responses at ids"):
        check_ends(key, info, dataclasses.replace(ours, model=(*ours.model, 7)))
    return info.ends


def span_error(
    reference: torch.nn.Module, request: RolloutRequest, reply: RolloutReply, start: int, stop: int
) -> float:
    """Largest error of the cached log-probs of tokens [start, stop) under the reference."""
    prompt, draws = len(request.input_ids), reply.draws
    logits = reference_logits(reference, [*request.input_ids, *reply.output_ids_T.tolist()])
    logp = log_softmax(logits[prompt - 1 + start : prompt - 1 + stop])
    row = slice(draws.offsets_T1[start], draws.offsets_T1[stop])
    row_N = np.repeat(np.arange(stop - start), np.diff(draws.offsets_T1[start : stop + 1]))
    return float(np.abs(logp[row_N, draws.ids_N[row]] - draws.sampler_logp_N[row]).max())


def routed(model: torch.nn.Module, ids: list[int], topk: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers: experts [X, L, topk], sorted, and whether [X, L] they are no near tie."""
    logits: list[torch.Tensor] = []
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [g.register_forward_hook(lambda *call: logits.append(call[2][0])) for g in gates]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    ordered = torch.stack(logits, 1).sort(-1, descending=True)
    clear = ordered.values[..., topk - 1] - ordered.values[..., topk] > NEAR_TIE
    return ordered.indices[..., :topk].sort(-1).values.numpy(), clear.numpy()


def gate_error(model: torch.nn.Module, request: RolloutRequest, reply: RolloutReply) -> float:
    """Largest |server - transformers| of the weights of each input's experts, pair by pair.

    transformers' are those that its experts' outputs are multiplied with, spread over all experts
    by id, so that the order in which either side names them has no say.
    """
    found: list[torch.Tensor] = []

    def spread(gate: Any, given: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, weights, experts = output
        found.append(torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype)))

    named = model.named_modules()
    hooks = [m.register_forward_hook(spread) for name, m in named if name.endswith("mlp.gate")]
    ids = [*request.input_ids, *reply.output_ids_T.tolist()][:-1]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    expected_XLE = torch.stack(found, 1).double().numpy()
    assert reply.experts_XLk is not None
    assert reply.gates_XLk is not None
    ours_XLE = np.zeros_like(expected_XLE)
    np.put_along_axis(ours_XLE, reply.experts_XLk.astype(np.int64), reply.gates_XLk, axis=2)
    _, clear_XL = routed(model, ids, reply.experts_XLk.shape[-1])
    # where a near tie may be broken otherwise, this layer and those after it are another model's
    whole_X = clear_XL.all(1)
    assert whole_X.mean() > 0.8
    return float(np.abs(ours_XLE - expected_XLE)[whole_X].max())


def differing_rows(
    model: Any, request: RolloutRequest, reply: RolloutReply, first: int, stop: int
) -> int:
    """Of the rows of inputs [first, stop), those that differ from the model's routers'."""
    experts = reply.experts_XLk
    assert experts is not None
    ids = [*request.input_ids, *reply.output_ids_T.tolist()][:-1]
    expected, clear = routed(model, ids, experts.shape[-1])
    assert experts.shape == expected.shape
    assert clear.mean() > 0.9
    wrong = (np.sort(experts, -1) != expected).any(-1) & clear
    return int(wrong[first:stop].any(-1).sum())


def wrong_rows(request: RolloutRequest, reply: RolloutReply, models: Mapping[int, Any]) -> int:
    """Rows that are not what the newest of the versions that sampled the reply would choose."""
    assert reply.experts_XLk is not None
    newest = models[reply.spans[-1][0]]
    return differing_rows(newest, request, reply, 0, len(reply.experts_XLk))


def ragged_request(
    rid: str, prompt: int, response: int, seed: int, more: Sequence[int] = ()
) -> ScoreRequest:
    """Random tokens; every row has 0 to 65 random ids to score.

    more: lengths of what follows, given and sampled in turn.
    """
    rng = np.random.default_rng(seed)
    edges = np.cumsum([prompt, response, *more]).reshape(-1, 2).tolist()
    lengths = rng.integers(0, 66, size=sum(stop - start for start, stop in edges))
    ids = [np.sort(rng.choice(VOCAB_SIZE, size=n, replace=False)) for n in lengths]
    return ScoreRequest(
        exact=True,
        rid=rid,
        input_ids=rng.integers(2, VOCAB_SIZE, size=edges[-1][1]).tolist(),
        runs=tuple((start, stop) for start, stop in edges),
        offsets_T1=np.concatenate([[0], np.cumsum(lengths)]),
        ids_N=np.concatenate(ids).astype(np.int32),
    )


def expected_scores(model, request: ScoreRequest, shift: int = 0) -> np.ndarray:
    logits = reference_logits(model, list(request.input_ids))
    logp = log_softmax(logits / request.temperature)
    row_N = np.repeat(np.arange(request.num_tokens), np.diff(request.offsets_T1))
    return logp[request.position_T[row_N] + shift, request.ids_N]


def check_selection(model, request: ScoreRequest, reply: ScoreReply) -> None:
    """Against q of transformers: scores, weights, given ids found again."""
    rows = reply.selection
    assert rows.ids_N[rows.given_N].tolist() == request.ids_N.tolist()
    logits = reference_logits(model, list(request.input_ids)) / request.temperature
    logp_TV = log_softmax(logits)[request.position_T]
    is_given_N = np.zeros(len(rows.ids_N), dtype=bool)
    is_given_N[rows.given_N] = True
    assert (is_given_N | (rows.weight_N > 0)).all()
    for t in range(request.num_tokens):
        row = slice(rows.offsets_T1[t], rows.offsets_T1[t + 1])
        ids, weight = rows.ids_N[row], rows.weight_N[row]
        error = np.abs(logp_TV[t, ids] - rows.logp_N[row]).max()
        bounded(SCORES, error, TOLERANCE, request.rid)
        error = selection_error(logp_TV[t], ids, weight, request.num_atoms, request.num_draws)
        bounded("teacher selections: weights (relative)", error, 5e-5, (request.rid, t))
