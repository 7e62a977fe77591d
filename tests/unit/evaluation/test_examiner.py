"""Evaluations whose answers are trajectories, with fake environments on a virtual clock."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_opd.data.judge import Judge
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.environments.protocol import Said, TrajectoryEnd
from megatron_opd.errors import UserError
from megatron_opd.evaluation.examiner import TRAJECTORIES_A_TURN, EvaluationPlan
from megatron_opd.evaluation.measure import evaluate
from megatron_opd.evaluation.ports import Completion
from megatron_opd.evaluation.reports import EvaluationReport, TurnMeans
from megatron_opd.records.drops import EMPTY_RESPONSE, ENVIRONMENT_FAILED, VERIFIER_TIMED_OUT
from megatron_opd.records.types import Prompt
from megatron_opd.sim.clock import run_virtual
from tests.support.playing import FAMILY, WIDE, played_here

SAMPLING_S = 2.0
WORD = len(FAMILY.ids("right<|im_end|>"))


class Asking:
    """Asks three times; its reward is of its prompt: the number that this names."""

    slow_s = 0.0
    seeds: list[int]

    async def start(self, row: Any) -> str:
        self._turns, self._row = 0, row
        return row.prompt

    async def step(self, reply: Any) -> Any:
        await asyncio.sleep(self.slow_s)
        self._turns += 1
        if self._row.prompt == "fails" and self._turns == 2:
            raise RuntimeError("spoilt")
        if self._turns < 3:
            return Said("Again.", None)
        return TrajectoryEnd(None if self._row.prompt == "judged" else float(self._row.prompt))


class Port:
    """Samples a word, or nothing, and others first; versions rise by the turn."""

    def __init__(self, word: str = "right", *others: str) -> None:
        self.word, self.others, self.asked = word, others, list[dict[str, Any]]()
        self.working = self.most = 0

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(FAMILY.ids("<|im_end|>"))

    async def complete(self, prompt_ids: Any, **keys: Any) -> Completion:
        number = len(self.asked)
        self.asked.append(keys | {"ids": list(prompt_ids)})
        self.working += 1
        self.most = max(self.most, self.working)
        await asyncio.sleep(SAMPLING_S)
        self.working -= 1
        word = self.others[number] if number < len(self.others) else self.word
        ids = FAMILY.ids(f"{word}<|im_end|>") if word else []
        cut = len(ids) > keys["max_new_tokens"]
        reason = "length" if cut else "stop"
        ids = ids[: keys["max_new_tokens"]]
        return Completion(ids, reason, (number, number + 1), f"http://{number}:1")


class Verifier:
    """Accepts "right", and takes too long for "slow"."""

    async def verify(self, task: str, response: str, answer: Any) -> float:
        if response == "slow":
            raise VerifierFailed(VERIFIER_TIMED_OUT, "1 s")
        return float(response == answer)


JUDGE = Judge(Verifier(), "exact", ResponseText(FAMILY.tokenizer().decode))  # type: ignore[arg-type]


def prompt(number: int, text: str) -> Prompt:
    answer = "right" if text == "judged" else None
    return Prompt(number, text, np.array([1], np.int32), answer, row_id=f"file:{number}")


def measured(
    texts: list[str],
    port: Port,
    kind: Any = Asking,
    judge: Judge | None = JUDGE,
    limits: Any = WIDE,
    **plan: Any,
) -> EvaluationReport:
    """Evaluates prompts with an environment."""
    how = {"samples": 1, "temperature": 0.5, "max_new_tokens": 30, "concurrency": 3, "seed": 7}
    prompts = [prompt(number, text) for number, text in enumerate(texts)]
    each = EvaluationPlan(**(how | plan))  # type: ignore[arg-type]
    return run_virtual(evaluate(port, prompts, judge, each, played_here(kind, limits)))


def test_rewards_are_those_of_environments_and_right_is_what_has_at_least_one():
    port = Port()
    report = measured(["1", "2.5", "0.75", "-3"], port, judge=None)
    assert report.accuracy_pct == 50
    assert report.mean_reward == (1 + 2.5 + 0.75 - 3) / 4
    assert report.mean_response_tokens == 3 * WORD
    assert report.turns == TurnMeans(3.0, 0.0, 0.0)
    assert (report.version_min, report.version_max) == (0, 12)
    assert report.truncated_pct == 0
    assert report.verifier_failures == {}
    for asked in port.asked:
        assert (asked["temperature"], asked["max_new_tokens"], asked["stop"]) == (0.5, 30, ())
    row = report.as_dict()
    assert (row["mean_turns"], row["mean_tool_calls"], row["mean_call_errors"]) == (3, 0, 0)
    assert "turns" not in row
    assert f"{3 * WORD:.1f} tokens a response, 3.0 turns, mean reward 0.312, 0.0%" in report.line()


def test_what_the_environment_does_not_judge_the_verifier_does_by_the_last_turn():
    assert measured(["judged"] * 2, Port()).accuracy_pct == 100
    assert measured(["judged"], Port("right", "wrong", "wrong")).accuracy_pct == 100
    report = measured(["judged"], Port("wrong", "right", "right"))
    assert (report.accuracy_pct, report.verifier_failures) == (0, {})


def test_what_fails_is_wrong_and_counted_and_never_left_out():
    report = measured(["fails", "1", "1", "1"], Port())
    assert report.accuracy_pct == 75
    assert report.verifier_failures == {ENVIRONMENT_FAILED: 1}
    assert report.turns == TurnMeans((2 + 3 * 3) / 4, 0.0, 0.0), "what was sampled of it counts"
    assert report.mean_response_tokens == WORD * (2 + 3 * 3) / 4
    assert report.line().endswith(f"truncated, 1 counted as wrong: {ENVIRONMENT_FAILED}")
    assert measured(["judged"], Port("slow")).verifier_failures == {VERIFIER_TIMED_OUT: 1}
    report = measured(["1"] * 2, Port(""))
    assert report.verifier_failures == {EMPTY_RESPONSE: 2}
    assert (report.version_min, report.accuracy_pct) == (0, 0)


def test_what_nothing_judges_stops_the_evaluation_in_one_line():
    class Silent(Asking):
        async def step(self, reply: Any) -> Any:
            return TrajectoryEnd()

    for judge in (JUDGE, None):
        with pytest.raises(UserError) as raised:
            measured(["1"], Port(), Silent, judge)
        words = str(raised.value)
        assert words.startswith("evaluation: the environment ended file:0 ('1') without a reward")
        assert "data.answer_key" in words
        assert "\n" not in words


def test_a_limit_ends_a_trajectory_as_truncated_and_wrong_where_nothing_judges_it():
    report = measured(["1"] * 2, Port(), limits=replace(WIDE, max_turns=2))
    assert (report.truncated_pct, report.accuracy_pct, report.mean_reward) == (100, 0, 0)
    assert report.turns == TurnMeans(2.0, 0.0, 0.0)
    port = Port()
    report = measured(["1"], port, max_new_tokens=WORD - 1)
    assert (report.truncated_pct, report.mean_response_tokens) == (100, WORD - 1)
    port = Port()
    measured(["1"], port, limits=replace(WIDE, max_turn_tokens=WORD), max_new_tokens=50)
    assert {asked["max_new_tokens"] for asked in port.asked} == {WORD}
    judged = measured(["judged"], Port(), limits=replace(WIDE, max_turns=2))
    assert (judged.truncated_pct, judged.accuracy_pct) == (100, 100), "as it stands"


def test_every_turn_has_a_seed_of_its_own_and_the_same_one_in_every_evaluation():
    class Seeded(Asking):
        async def start(self, row: Any) -> str:
            told.append(row.seed)
            return await super().start(row)

    seeds: list[set[int]] = []
    of_rows: list[set[int]] = []
    for concurrency, seed in ((3, 1), (1, 1), (3, 2)):
        port, told = Port(), list[int]()
        measured(["1"] * 4, port, Seeded, samples=2, concurrency=concurrency, seed=seed)
        seeds.append({asked["seed"] for asked in port.asked})
        of_rows.append(set(told))
    assert [len(each) for each in seeds] == [4 * 2 * 3] * 3
    assert [len(each) for each in of_rows] == [4 * 2] * 3
    for found in (seeds, of_rows):
        assert found[0] == found[1], "whatever runs beside it"
        assert not found[0] & found[2], "the run's seed is in all of them"


def test_a_turn_follows_exactly_the_ids_before_it_on_the_same_server():
    port = Port()
    measured(["1"], port)
    assert [asked["prefer"] for asked in port.asked] == ["", "http://0:1", "http://1:1"]
    first, second, _ = port.asked
    start = len(first["ids"])
    assert second["ids"][: start + WORD] == first["ids"] + FAMILY.ids("right<|im_end|>")
    text = FAMILY.tokenizer().decode(second["ids"][start + WORD :])
    assert text == "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"


def test_no_slot_is_held_while_an_environment_answers():
    """Its two waits of 3 s leave room for other turns, of which there are never more than slots."""

    class Slow(Asking):
        slow_s = 3.0

    async def timed() -> float:
        begun = asyncio.get_running_loop().time()
        plan = EvaluationPlan(1, 1.0, 30, concurrency=2)
        prompts = [prompt(number, "1") for number in range(16)]
        await evaluate(port, prompts, None, plan, played_here(Slow))
        return asyncio.get_running_loop().time() - begun

    port = Port()
    seconds = run_virtual(timed())
    assert port.most == 2
    sampling_s = 16 * 3 * SAMPLING_S / 2
    waiting_s = 16 * 3 * Slow.slow_s / 2
    assert seconds < sampling_s + 0.25 * waiting_s, "120 s if a trajectory kept its slot"


def test_only_some_environments_are_there_at_once():
    """Each has a process."""
    there = most = 0

    class Counted(Asking):
        slow_s = 100.0

        async def start(self, row: Any) -> str:
            nonlocal there, most
            there += 1
            most = max(most, there)
            return await super().start(row)

        async def step(self, reply: Any) -> Any:
            nonlocal there
            said = await super().step(reply)
            there -= isinstance(said, TrajectoryEnd)
            return said

    measured(["1"] * 10, Port(), Counted, samples=4, concurrency=3)
    assert most == 3 * TRAJECTORIES_A_TURN
