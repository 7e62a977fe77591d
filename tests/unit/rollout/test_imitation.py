"""The teacher answers its share of the prompts, whatever its servers show of what they write."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from harness.foreign_replies import EOS, LOGP_VV, VOCAB_SIZE, written
from megatron_opd.batching.advantages import group_columns
from megatron_opd.batching.rank_batch import check_sample
from megatron_opd.buffer.rejection import RolloutRejected
from megatron_opd.config.schema import Config
from megatron_opd.fleet.clients import FOREIGN
from megatron_opd.records.imitation import is_imitated
from megatron_opd.records.types import Prompt, Rollout, VersionSpan, rollout_here
from megatron_opd.rollout.imitation import ImitatingGenerator, StudentIds
from megatron_opd.rollout.scorer import FleetScorer
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.fleet import Fleet
from tests.support.config_files import minimal
from tests.support.fakes import make_rollout
from tests.support.foreign_server import ForeignServer, Form, busy

PROMPT = Prompt(6, "hi", np.array([3, 5], np.int32), row_id="r")
API: dict[Form, str] = {"sglang": "sglang", "vllm": "openai", "chat": "chat"}
MIXED = {
    "type": "mixture",
    "terms": [
        {"objective": {"type": "sft_on_teacher", "share": 0.25, "temperature": 0.0}},
        {"objective": {"type": "reverse_kl"}},
    ],
}


class Student:
    """Answers at once, and remembers whom."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def generate(self, prompt: Prompt) -> Rollout:
        self.asked.append(prompt.uid)
        return make_rollout(prompt, (VersionSpan(0, 0, 3),))


def config_of(form: Form, objective: dict[str, Any] | None = None, **sections: Any) -> Config:
    alone = {"type": "sft_on_teacher", "temperature": 0.0}
    teacher = {"model": "m", "urls": ["http://127.0.0.1:1"], "api": API[form]}
    given: dict[str, Any] = {"teacher": teacher, "rollout": {"max_new_tokens": 6}}
    return minimal(**({"objective": objective or alone} | given | sections))


def cut(text: str) -> list[int]:
    """Ids of letters: what the toy's chat writes."""
    return [ord(letter) - ord("a") for letter in text]


def answers(
    server: ForeignServer,
    config: Config,
    prompts: list[Prompt],
    student: Student | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> list[Rollout]:
    async def run() -> list[Rollout]:
        async with server.up():
            kind = FOREIGN[config.all_teachers["teacher"].api]
            fleet = Fleet([kind(server.url, timeout_s=20)])
            ids = StudentIds(vocab_size, cut, (EOS,), EOS)
            generator = ImitatingGenerator(
                config, student or Student(), {"teacher": fleet}, ids, lambda: 4, "run"
            )
            async with fleet:
                found = await asyncio.gather(*map(generator.generate, prompts))
            return [rollout_here(each) for each in found]

    return asyncio.run(run())


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_an_answer_is_behind_the_students_prompt_id_by_id(form: Form):
    """The teacher reads its own prompt; the version is the student's."""
    theirs = replace(PROMPT, teacher_ids_Q=np.array([7, 2, 9], np.int32))
    server = ForeignServer(form)
    (rollout,) = answers(server, config_of(form), [theirs])
    ids = written([7, 2, 9], 6, [])
    assert rollout.response_ids_T.tolist() == ids
    assert rollout.sequences[0].tolist() == [3, 5, *ids]
    assert rollout.spans == (VersionSpan(4, 0, len(ids)),)
    befores = [9, *ids[:-1]]
    np.testing.assert_allclose(rollout.draws.sampler_logp_N, LOGP_VV[befores, ids], rtol=1e-6)
    assert not rollout.draws.weight_N.any()
    asked = server.asked[0].get("sampling_params", server.asked[0])
    assert asked["temperature"] == 0.0
    assert asked["stop_token_ids"] == [EOS]


def test_a_text_is_cut_by_the_students_tokenizer_and_ended():
    (rollout,) = answers(ForeignServer("chat"), config_of("chat"), [PROMPT])
    out = written([each % VOCAB_SIZE for each in b"hi"], 6, [])
    ids = [each for each in out if each != EOS]
    assert rollout.response_ids_T.tolist() == ids + [EOS] * (EOS in out)
    assert rollout.finish_reason == ("stop" if EOS in out else "length")
    assert np.isfinite(rollout.draws.sampler_logp_N).all()


def longer(reply: dict[str, Any]) -> None:
    reply["choices"][0]["message"]["content"] = "ab" * 20
    reply["choices"][0]["finish_reason"] = "stop"


def test_more_ids_than_the_student_may_have_are_cut():
    (rollout,) = answers(ForeignServer("chat", damage=longer), config_of("chat"), [PROMPT])
    assert rollout.response_ids_T.tolist() == [0, 1] * 3
    assert rollout.finish_reason == "length"


def emptied(reply: dict[str, Any]) -> None:
    reply["choices"][0]["message"]["content"] = ""
    reply["choices"][0]["finish_reason"] = "length"


@pytest.mark.parametrize(
    ("form", "damage", "reason"),
    [
        ("chat", emptied, "empty_response"),
        ("chat", lambda reply: reply.pop("choices"), "teacher_bad_reply"),
        ("sglang", lambda reply: reply["output_ids"].__setitem__(0, 3), "teacher_bad_reply"),
    ],
)
def test_what_cannot_be_learnt_is_dropped_with_a_reason(
    form: Form, damage: Callable[[dict[str, Any]], Any], reason: str
):
    with pytest.raises(RolloutRejected) as found:
        answers(ForeignServer(form, damage=damage), config_of(form), [PROMPT])
    assert found.value.reason == reason


def test_ids_that_the_student_lacks_are_dropped():
    with pytest.raises(RolloutRejected) as found:
        answers(ForeignServer("sglang"), config_of("sglang"), [PROMPT], vocab_size=2)
    assert found.value.reason == "teacher_unknown_id"


def test_a_teacher_that_is_busy_all_the_time_is_given_up():
    server = ForeignServer("sglang", [lambda: busy(503)] * 9)
    with pytest.raises(RolloutRejected) as found:
        answers(server, config_of("sglang", scoring={"attempts": 2}), [PROMPT])
    assert found.value.reason == "teacher_unavailable"
    assert len(server.asked) == 2


def test_groups_are_shared_as_the_mixture_says():
    prompts = [replace(PROMPT, uid=uid) for uid in range(16)]
    config = config_of(
        "sglang",
        MIXED,
        rollout={"max_new_tokens": 6, "group_size": 2},
        support={"type": "path"},
        buffer={"batch_size": 16},
    )
    student, server = Student(), ForeignServer("sglang")
    rollouts = answers(server, config, prompts, student)
    theirs = [uid for uid in range(16) if uid not in student.asked]
    assert theirs == [6, 7, 14, 15], "a quarter, in whole groups"
    assert len(server.asked) == 4
    scorer = FleetScorer(config, {"teacher": Silent()}, VOCAB_SIZE, "run")
    samples = [run_virtual(scorer.score(rollouts[uid])) for uid in theirs]
    assert not any(sample.has_scores for sample in samples)
    for sample in samples:
        check_sample(sample)  # type: ignore[arg-type]
    columns = group_columns(config.estimator, samples, 2)
    assert columns.imitation_weight_B.tolist() == [1.0] * 4
    assert columns.teacher_weight_B.tolist() == columns.reward_weight_B.tolist() == [0.0] * 4


class Silent:
    """A fleet that nobody may ask."""

    async def score(self, request: Any) -> Any:
        raise AssertionError("what the teacher wrote is not scored")


@pytest.mark.parametrize("share", [Fraction(1, 10), Fraction(1, 3), Fraction(7, 9), Fraction(1)])
@pytest.mark.parametrize("group_size", [1, 3])
def test_every_beginning_of_a_run_holds_its_share(share: Fraction, group_size: int):
    theirs = 0
    for group in range(200):
        members = {
            is_imitated(group * group_size + n, group_size, share) for n in range(group_size)
        }
        assert len(members) == 1, "a group has one author"
        theirs += members.pop()
        assert theirs == (group + 1) * share // 1
