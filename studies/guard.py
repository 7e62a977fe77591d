"""How far a teacher's scores are from the log-probs it samples with: rounding against nonsense.

    python -m studies guard

Servers of the demo's teacher (dense) and of its student (a mixture of experts, asked as a teacher),
each in float32 and in bfloat16, and of the teacher with its head zeroed. Every server is probed as
scoring.guard probes it, with more prompts; and probed again through clients that spoil its scores.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.torch import load_file, save_file

from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.records import Columns
from megatron_opd.inputs.model_facts import read_model
from megatron_opd.inputs.tokenizers import load_tokenizer
from megatron_opd.records.sample_figures import ScoreShape
from megatron_opd.records.types import FloatArray, Prompt
from megatron_opd.rollout.teacher_guard import TOKENS, TeacherProbe, probe
from sglang_bridge.client import ServerClient
from sglang_bridge.ports import free_port
from sglang_bridge.protocol import RolloutReply, RolloutRequest, ScoreReply, ScoreRequest
from sglang_bridge.retry import Backoff
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec

MODELS = Path("examples/arithmetic")
PROMPTS = 64
RULES = PromptRules(Columns(("prompt",)), max_tokens=64)
STARTUP_S = 300.0
DTYPES = ("float32", "bfloat16")
Spoil = Callable[[ScoreRequest, FloatArray, int], FloatArray]


def _shifted(request: ScoreRequest, logp_N: FloatArray, vocab_size: int) -> FloatArray:
    """Every row gets the scores of the next one, as far as it has ids."""
    rows = np.split(logp_N, request.offsets_T1[1:-1])
    moved = [np.resize(rows[(t + 1) % len(rows)], len(row)) for t, row in enumerate(rows)]
    return np.concatenate(moved)


def _uniform(request: ScoreRequest, logp_N: FloatArray, vocab_size: int) -> FloatArray:
    return np.full_like(logp_N, -np.log(vocab_size))


SPOILS: dict[str, Spoil] = {"shifted_by_a_row": _shifted, "uniform": _uniform}


class Spoiled:
    """A server whose scores are spoiled on the way."""

    def __init__(self, client: ServerClient, spoil: Spoil, vocab_size: int) -> None:
        self.url, self._client, self._spoil = client.url, client, spoil
        self._vocab_size = vocab_size

    async def generate(self, request: RolloutRequest) -> RolloutReply:
        """As the server does."""
        return await self._client.generate(request)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """Spoiled."""
        reply = await self._client.score(request)
        return replace(reply, logp_N=self._spoil(request, reply.logp_N, self._vocab_size))


class OtherPrompt(Spoiled):
    """A server that scores the response after another prompt of the same length."""

    def __init__(self, client: ServerClient, vocab_size: int) -> None:
        super().__init__(client, lambda request, logp_N, _: logp_N, vocab_size)

    async def score(self, request: ScoreRequest) -> ScoreReply:
        """After the prompt read backwards."""
        ids, first = np.asarray(request.input_ids).copy(), request.runs[0][0]
        ids[:first] = ids[:first][::-1]
        return await self._client.score(msgspec.structs.replace(request, input_ids=ids))


def measure() -> dict[str, Any]:
    """A row for every server."""
    with tempfile.TemporaryDirectory() as scratch:
        empty = without_head(MODELS / "teacher", Path(scratch) / "teacher")
        cases = [
            (f"{name}, {dtype}", model, dtype)
            for name, model in (("dense", MODELS / "teacher"), ("experts", MODELS / "student"))
            for dtype in DTYPES
        ]
        cases.append(("head of zeros, float32", empty, "float32"))
        rows = {name: served(model, dtype, Path(scratch)) for name, model, dtype in cases}
    return {"prompts": PROMPTS, "tokens": TOKENS, "servers": rows}


def without_head(model: Path, out: Path) -> Path:
    """A copy of a checkpoint whose LM head is 0: it says -ln V of every token."""
    shutil.copytree(model, out)
    weights = load_file(model / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[head] = weights[head] * 0
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def served(model: Path, dtype: str, scratch: Path) -> dict[str, Any]:
    """Probes of one server, as it is and spoiled."""
    spec = ServerSpec(
        model_path=str(model),
        role="teacher",
        port=free_port(),
        dtype=dtype,
        max_total_tokens=32768,
        mem_fraction_static=0.3,
    )
    server = ServerProcess(spec, scratch / "server.log")
    try:
        server.start()
        server.wait_ready(STARTUP_S)
        return asyncio.run(_probed(model, spec.url, dtype))
    finally:
        server.stop()


async def _probed(model: Path, url: str, dtype: str) -> dict[str, Any]:
    vocab_size = read_model(model, "--model").vocab_size
    tokenizer = load_tokenizer(model, "--model")
    prompts = load_prompts(MODELS / "heldout.jsonl", tokenizer, RULES).prompts[:PROMPTS]
    async with ServerClient(url, timeout_s=120) as client:
        servers: dict[str, Any] = {"itself": client}
        servers |= {name: Spoiled(client, spoil, vocab_size) for name, spoil in SPOILS.items()}
        servers["other_prompt"] = OtherPrompt(client, vocab_size)
        return {
            name: _figures(await _probe(server, prompts, vocab_size, name), dtype, vocab_size)
            for name, server in servers.items()
        }


async def _probe(
    server: Any, prompts: tuple[Prompt, ...], vocab_size: int, name: str
) -> TeacherProbe:
    return await probe(
        server,
        prompts,
        temperature=1.0,
        max_new_tokens=TOKENS,
        vocab_size=vocab_size,
        name=f"benchmark-{name}",
        backoff=Backoff(attempts=1),
    )


def _figures(found: TeacherProbe, dtype: str, vocab_size: int) -> dict[str, Any]:
    shape: ScoreShape = found.shape
    return {
        "median_gap_nats": found.gap_nats,
        "worst_gap_nats": found.worst_nats,
        "ids": found.num_ids,
        "score_mean_nats": shape.mean,
        "score_std_nats": shape.std,
        "near_uniform_fraction": shape.near_uniform_fraction,
        "problem": found.problem(dtype, vocab_size),
    }
