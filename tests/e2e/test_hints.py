"""Hints, asked of a real teacher, against whole distributions of its model."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_opd.data.hint_swap import HintSwap
from megatron_opd.metrics.hint_leak import HintedScores, measure
from megatron_opd.records.types import Prompt, Rollout, VersionSpan
from megatron_opd.rollout.hint_meter import ATOMS, HintProbe
from sglang_bridge.client import ServerClient
from sglang_bridge.fleet import Fleet
from sglang_bridge.server.launch import ServerProcess
from tests.support.config_files import minimal
from tests.support.figures import bounded
from tests.support.mixed_teachers import path_rollout
from tests.support.models import VOCAB_SIZE
from tests.support.oracles import load_reference, log_softmax, reference_logits

pytestmark = pytest.mark.e2e

TEMPERATURE, RESPONSES, TOKENS = 1.3, 6, 24


def rollouts() -> list[Rollout]:
    rng, found = np.random.default_rng(5), []
    for uid in range(RESPONSES):
        ids_P, own_Q = (rng.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in (9, 15 + uid))
        response = rng.integers(3, VOCAB_SIZE, TOKENS).tolist()
        made = path_rollout(Prompt(uid, f"p{uid}", ids_P, teacher_ids_Q=own_Q), response)
        run = replace_run(made, len(ids_P))
        found.append(replace(made, runs=(run,), spans=(VersionSpan(0, 0, TOKENS),)))
    return found


def replace_run(rollout: Rollout, start: int):
    (run,) = rollout.runs
    return type(run)(run.sequence, start, start + TOKENS)


def test_scores_behind_three_prompts_are_those_of_the_model(
    teacher_server: ServerProcess, teacher_model: Path
):
    made = rollouts()
    wrong = [made[n - 1].prompt.teacher_ids_Q for n in range(RESPONSES)]

    async def run() -> list[HintedScores]:
        async with Fleet([ServerClient(teacher_server.spec.url, timeout_s=120)]) as teacher:
            config = minimal(
                scoring={"temperature": TEMPERATURE},
                metrics={"leak_every": 1},
                data={"train": "train.jsonl", "teacher_prompt_key": "hint"},
            )
            swap = HintSwap(str, lambda text: [])  # the wrong prompts are given here
            probe = HintProbe(config, {"teacher": teacher}, swap, VOCAB_SIZE, {})
            asked = (probe.score(rollout, ids) for rollout, ids in zip(made, wrong, strict=True))
            return list(await asyncio.gather(*asked))

    answers = asyncio.run(run())
    model = load_reference(teacher_model)
    for rollout, ids_Q, scores in zip(made, wrong, answers, strict=True):
        prompts = (rollout.prompt.token_ids_P, rollout.prompt.teacher_ids_Q, ids_Q)
        q_TV, right_TV, wrong_TV = (
            log_softmax(
                np.asarray(reference_logits(model, [*prompt, *rollout.response_ids_T]))[
                    len(prompt) - 1 : -1
                ]
                / TEMPERATURE
            )
            for prompt in prompts
        )
        without = scores.without
        rows = np.repeat(np.arange(TOKENS), np.diff(without.offsets_T1))
        assert len(rows) >= TOKENS * min(ATOMS, VOCAB_SIZE)
        for said_N, real_TV in (
            (without.logp_N, q_TV),
            (scores.right_N, right_TV),
            (scores.wrong_N, wrong_TV),
        ):
            real_N = real_TV[rows, without.ids_N]
            bounded("scores with other hints", np.abs(said_N - real_N).max(), 5e-5)
            control = np.roll(real_TV, 1, 0)[rows, without.ids_N]
            assert np.abs(said_N - control).max() > 0.05, "control: a row late"
    found = measure(answers)
    assert found.tokens == RESPONSES * TOKENS
    assert found.hint_share is not None
    assert found.right_nats > 0
