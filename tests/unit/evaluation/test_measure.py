"""avg@k through fake completion ports."""

import asyncio
import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.config.verifier import VerifierConfig
from megatron_opd.data.judge import Judge
from megatron_opd.data.response_text import ResponseText
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data.verifying import TaskVerifiers
from megatron_opd.evaluation.examiner import EvaluationPlan
from megatron_opd.evaluation.measure import evaluate
from megatron_opd.evaluation.ports import Completion, FleetPort, RespellingPort
from megatron_opd.evaluation.reports import EvaluationReport
from megatron_opd.records.drops import VERIFIER_TIMED_OUT
from megatron_opd.records.types import Prompt
from sglang_bridge.fleet import Fleet

TOKENIZER = build_tokenizer()
VERIFIERS = TaskVerifiers(("arithmetic",), VerifierConfig())
JUDGE = Judge(VERIFIERS, "arithmetic", ResponseText(TOKENIZER.decode))


def problems(answers):
    return [
        Prompt(uid=i, text=f"p{i}", token_ids_P=np.array([i + 1], np.int32), answer=answer)
        for i, answer in enumerate(answers)
    ]


def plan(**overrides):
    defaults = {
        "samples": 2,
        "temperature": 1.0,
        "max_new_tokens": 8,
        "concurrency": 3,
    }
    return EvaluationPlan(**(defaults | overrides))


class ScriptedPort:
    """Gives each prompt's texts in turn; records what it was asked and how many ran at once.

    reasons: why a text ended, where it neither has an end token nor is cut.
    """

    end_ids = (1,)

    def __init__(self, texts, delay_s=0.0, reasons=None):
        self.left = {i + 1: list(given_texts) for i, given_texts in enumerate(texts)}
        self.delay_s, self.running, self.peak, self.asked = delay_s, 0, 0, []
        self.seeds: list[int] = []
        self.stops: list[tuple[str, ...]] = []
        self.reasons = reasons or {}

    async def complete(self, prompt_ids, *, max_new_tokens, temperature, stop, seed, prefer=""):
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.asked.append((tuple(prompt_ids), max_new_tokens, temperature))
        self.seeds.append(seed)
        self.stops.append(stop)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        version = prompt_ids[0]
        text = self.left[prompt_ids[0]].pop(0)
        reason = self.reasons.get(text) or ("stop" if "<eos>" in text else "length")
        return Completion(TOKENIZER.encode(text), reason, (version, 10 * version))


def run(port, answers, judge=JUDGE, **overrides):
    return asyncio.run(evaluate(port, problems(answers), judge, plan(**overrides)))


def test_figures_of_a_small_case():
    port = ScriptedPort([["#1<eos>", "#2<eos>"], ["#2<eos>#9", "x\n#2<eos>"], ["#3", "<eos>#3"]])
    report = run(port, ["1", "2", "3"])
    # per problem 1/2, 2/2, 1/2: an unfinished answer is judged as it stands, and counted truncated
    assert report.accuracy_pct == pytest.approx(100 * 2 / 3)
    assert report.stderr_pct == pytest.approx(100 * statistics.stdev([0.5, 1, 0.5]) / math.sqrt(3))
    assert (report.problems, report.samples) == (3, 2)
    assert report.truncated_pct == pytest.approx(100 / 6)
    assert report.mean_response_tokens == pytest.approx((3 + 3 + 3 + 5 + 2 + 1) / 6)
    assert sorted(port.asked) == [((i,), 8, 1.0) for i in (1, 1, 2, 2, 3, 3)]
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
    assert report.line().startswith("avg@2 66.7% +- 16.7 on 3 problems, pass@2 100.0%, 2.8 tok")
    assert report.pass_at_k == {1: pytest.approx(100 * 2 / 3), 2: 100}
    assert report.pass_at_k_stderr_pct == {1: pytest.approx(report.stderr_pct), 2: 0}
    assert (report.version_min, report.version_max) == (1, 30)
    assert (report.mean_reward, report.verifier_failures) == (pytest.approx(2 / 3), {})


def test_strings_end_answers_as_they_end_rollouts_and_no_such_answer_is_truncated():
    reasons = {"#1": "stop_string", "#2<eos>": "length"}  # an end token in the last place
    port = ScriptedPort([["#1", "#2"], ["#1", "#2<eos>"]], reasons=reasons)
    prompts = problems(["1", "2"])
    prompts[1] = replace(prompts[1], stop=("##", "\n#"))
    report = asyncio.run(evaluate(port, prompts, JUDGE, plan(stop=("\n#", "!"))))
    assert sorted(port.stops) == [("\n#", "!"), ("\n#", "!"), *[("\n#", "!", "##")] * 2]
    assert report.truncated_pct == 50
    assert report.accuracy_pct == 50


@given(
    correct=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6),
    concurrency=st.integers(1, 30),
)
def test_accuracy_is_the_mean_of_the_problem_rates(correct, concurrency):
    port = ScriptedPort([["#7<eos>" if ok else "#8<eos>" for ok in row] for row in correct])
    report = run(port, ["7"] * len(correct), samples=3, concurrency=concurrency)
    rates = [sum(row) / 3 for row in correct]
    assert report.accuracy_pct == pytest.approx(100 * statistics.mean(rates))
    assert not any(port.left.values())
    if len(rates) > 1:
        expected = 100 * statistics.stdev(rates) / math.sqrt(len(rates))
        assert report.stderr_pct == pytest.approx(expected)
    else:
        assert math.isnan(report.stderr_pct)
        assert report.as_dict()["stderr_pct"] is None


def test_concurrency_is_bounded_and_used():
    port = ScriptedPort([["#1<eos>"] * 4] * 5, delay_s=0.002)
    assert run(port, ["1"] * 5, samples=4, concurrency=3).accuracy_pct == 100
    assert port.peak == 3


def test_every_completion_has_its_own_seed_in_every_evaluation():
    texts = [["#1<eos>"] * 4] * 5
    seeds = []
    for concurrency, seed in ((3, 1), (1, 1), (3, 2)):
        port = ScriptedPort(texts)
        run(port, ["1"] * 5, samples=4, concurrency=concurrency, seed=seed)
        seeds.append(set(port.seeds))
    assert len(seeds[0]) == 20, "k completions of a problem are k samples"
    assert seeds[0] == seeds[1], "whatever runs beside it"
    assert not seeds[0] & seeds[2], "the run's seed is in all of them"


def test_a_failing_port_stops_the_evaluation_with_its_own_error():
    class FailingPort(ScriptedPort):
        async def complete(self, prompt_ids, **asked):
            if prompt_ids[0] == 2:
                raise ConnectionError("server gone")
            return await super().complete(prompt_ids, **asked)

    with pytest.raises(ConnectionError, match="server gone"):
        run(FailingPort([["#1<eos>"] * 2] * 3), ["1"] * 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"concurrency": 0}, "concurrency must be >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"temperature": -1.0}, r"temperature must be >= 0, got -1\.0"),
    ],
)
def test_a_bad_plan_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan(**overrides)


def test_problems_without_answers_are_refused():
    with pytest.raises(ValueError, match="at least one problem"):
        run(ScriptedPort([]), [])
    with pytest.raises(ValueError, match="problem 'p1' has none"):
        run(ScriptedPort([]), ["1", None])


def test_the_fleet_port_asks_for_plain_generation():
    asked, preferred = [], []

    class FakeFleet(Fleet):
        def __init__(self):
            pass

        async def generate(self, request, *, evaluates, prefer):
            assert evaluates, "by a server that is kept for evaluations"
            asked.append(request)
            preferred.append(prefer)
            spans = ((7, 0, 1), (9, 1, 2)) if len(asked) == 1 else ()
            ids_T = np.array([20, 1], np.int32)
            return SimpleNamespace(
                output_ids_T=ids_T, spans=spans, finish_reason="stop_string", url="http://a:1"
            )

    async def twice():
        port = FleetPort(FakeFleet(), attempts=1, end_ids=(1, 7))
        options = {"max_new_tokens": 9, "temperature": 0.0, "stop": ("#",), "seed": 17}
        return [
            await port.complete([5, 6], **options),
            await port.complete([5, 6], **options, prefer="http://a:1"),
        ]

    assert asyncio.run(twice()) == [
        Completion([20, 1], "stop_string", (7, 9), "http://a:1"),
        Completion([20, 1], "stop_string", None, "http://a:1"),
    ]
    assert preferred == ["", "http://a:1"]
    assert asked[0].rid != asked[1].rid
    for request in asked:
        assert list(request.input_ids) == [5, 6]
        assert (request.max_new_tokens, request.temperature) == (9, 0.0)
        assert (request.top_p, request.num_draws, request.seed) == (1.0, 0, 17)
        assert (request.stop, request.stop_token_ids) == (("#",), (1, 7))


class Scripted:
    """Gives each response the reward it spells, or fails as it says."""

    async def verify(self, task, response, answer):
        if response.startswith("#0"):
            raise VerifierFailed(VERIFIER_TIMED_OUT, "1 s")
        return int(response[1]) / 4


def test_a_partial_reward_is_not_correct_and_a_failed_verifier_is_wrong_and_counted():
    judge = Judge(Scripted(), "exact", ResponseText(TOKENIZER.decode))
    port = ScriptedPort([["#4<eos>", "#3<eos>"], ["#0<eos>", "#1<eos>"]])
    report = run(port, ["1", "2"], judge)
    assert report.accuracy_pct == 25
    assert report.mean_reward == pytest.approx((4 + 3 + 0 + 1) / 16)
    assert report.verifier_failures == {VERIFIER_TIMED_OUT: 1}
    assert report.line().endswith(", 1 counted as wrong: verifier_timed_out")


def test_report_is_frozen():
    report = EvaluationReport(1.0, 1.0, 1, 1, 1.0, 0.0, 0.01, {})
    with pytest.raises(AttributeError):
        report.accuracy_pct = 2.0


def test_a_model_of_another_tokenizer_answers_in_the_student_s_ids():
    """Ids are shifted by 100, and two of its tokens are one of the student's."""
    asked = []

    class Other:
        end_ids = (101,)

        async def complete(self, prompt_ids, **options):
            asked.append((list(prompt_ids), options["max_new_tokens"]))
            return Completion([105, 105, 101], "stop", (0, 0), "http://a")

    read = {np.array([3, 4], np.int32).tobytes(): [103, 104, 104]}
    port = RespellingPort(Other(), read, lambda ids: [i - 100 for i in ids[1:]], (1,))
    options = {"max_new_tokens": 5, "temperature": 1.0, "stop": (), "seed": 0}
    found = asyncio.run(port.complete([3, 4], **options))
    assert asked == [([103, 104, 104], 5)]
    assert (found.ids, found.finish_reason, found.url) == ([5, 1], "stop", "http://a")
    assert port.end_ids == (1,)
    with pytest.raises(KeyError):
        asyncio.run(port.complete([3], **options))
