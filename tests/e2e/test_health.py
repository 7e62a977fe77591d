"""Health of student and teacher, asked of real servers, against whole distributions."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from megatron_opd.metrics.opd_health import ScoredSelection, measure
from megatron_opd.records.types import Prompt, Rollout
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.teacher_health import HealthProbe
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess
from tests.e2e.conftest import Sections
from tests.support.config_files import minimal
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import load_reference, log_softmax, reference_logits
from tests.support.selections import select

pytestmark = pytest.mark.e2e

TOP_K = 8
TEMPERATURES = (0.8, 1.3)
ENDS = frozenset({1, 5})


def test_figures_are_those_of_the_models(
    shared: Sections,
    student_server: ServerProcess,
    teacher_server: ServerProcess,
    student_model: Path,
    teacher_model: Path,
):
    prompts = [
        Prompt(uid, "", np.arange(3, 9 + 7 * uid, dtype=np.int32) % VOCAB_SIZE) for uid in range(4)
    ]

    async def run() -> tuple[list[Rollout], list[ScoredSelection]]:
        async with (
            Fleet([ServerClient(student_server.spec.url, timeout_s=120)]) as student,
            Fleet([ServerClient(teacher_server.spec.url, timeout_s=120)]) as teacher,
        ):
            config = minimal(
                rollout={"max_new_tokens": 40, "temperature": TEMPERATURES[0]},
                scoring={"temperature": TEMPERATURES[1]},
                support={"type": "path"},
                metrics={"health_every": 1, "health_top_k": TOP_K},
            )
            generator = RolloutGenerator(config, student, VOCAB_SIZE, "health", ())
            fleets = {"student": student, "teacher": teacher}
            probe = HealthProbe(config, fleets, VOCAB_SIZE, ENDS)
            rollouts = await asyncio.gather(*map(generator.generate, prompts))
            return rollouts, await asyncio.gather(*map(probe.score, rollouts))

    rollouts, answers = asyncio.run(run())
    models = [load_reference(path) for path in (student_model, teacher_model)]
    whole = []
    for rollout in rollouts:
        ids = np.concatenate([rollout.prompt.token_ids_P, rollout.response_ids_T])
        first = len(rollout.prompt.token_ids_P) - 1
        p_TV, q_TV = (
            log_softmax(np.asarray(reference_logits(model, ids.tolist()))[first:-1] / temperature)
            for model, temperature in zip(models, TEMPERATURES, strict=True)
        )
        generator = np.random.default_rng(0)
        student = select(p_TV, [sorted(ENDS)] * len(p_TV), VOCAB_SIZE, 0, generator)
        rows = np.split(student.ids_N, student.offsets_T1[1:-1])
        whole.append(ScoredSelection(student, select(q_TV, rows, VOCAB_SIZE, 0, generator)))
    found, expected = measure(answers, TOP_K, ENDS), measure(whole, TOP_K, ENDS)
    assert found.tokens == expected.tokens > 20
    assert found.topk_overlap == pytest.approx(expected.topk_overlap, abs=2 / TOP_K / found.tokens)
    for name in ("teacher_mass", "eos_kl_nats", "eos_gap"):
        value = getattr(expected, name)
        assert getattr(found, name) == pytest.approx(value, rel=2e-3, abs=1e-5), name
    for name in ("student_entropy_nats", "teacher_entropy_nats"):
        # 16 draws a token from the tail, over all tokens
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.1), name
