"""`learner.mismatch_limit`: what is refused, told and recorded of the first updates."""

import asyncio
from typing import Any

import msgspec
import pytest

from megatron_opd.config.schema import Config
from megatron_opd.controller.errors import LoopFailed
from megatron_opd.errors import UserError
from megatron_opd.fleet.ends import FirstCause
from megatron_opd.inputs.notes import notes
from megatron_opd.metrics.mismatch_gap import Bound, MismatchGap, ModelsDiffer
from megatron_opd.metrics.mismatch_limits import ENOUGH
from megatron_opd.records.types import Batch
from megatron_opd.run.batch_learner import BatchLearner
from megatron_opd.run.first_update import NOT_JUDGED, OFF, MismatchJudge
from megatron_opd.transport.messages import UpdateMetrics
from tests.support.batches import FIGURES
from tests.support.wire import config

FAR, NEAR = 0.3, 1e-9


def judge_of(action: str, told: list[str], **sections: Any) -> MismatchJudge | None:
    base = config()
    learner = base.learner.model_copy(update={"mismatch_limit": action, "dtype": "float32"})
    student = base.student.model_copy(update={"dtype": "float32"})
    changed = base.model_copy(update={"learner": learner, "student": student} | sections)
    return MismatchJudge.of(changed, told.append, experts=False, gpu=False)


def judged(action: str, told: list[str]) -> MismatchJudge:
    judge = judge_of(action, told)
    assert judge is not None
    return judge


def figures(tokens: int, mean: float) -> UpdateMetrics:
    known = mean if tokens else None
    changed = {"probs_diff_mean": known, "mismatch_k3_nats": known, "mismatch_tokens": tokens}
    return msgspec.structs.replace(FIGURES, **changed)


class Remote:
    """Refuses as a learner does; keeps the bounds that it was sent."""

    def __init__(self, *updates: tuple[int, float]) -> None:
        self.updates, self.bounds = list(updates), []

    async def train(self, parts: Any, bound: Bound | None) -> UpdateMetrics:
        self.bounds.append(bound)
        tokens, mean = self.updates.pop(0)
        gap = MismatchGap(tokens, tokens * mean, tokens * mean)
        if bound is not None and not bound.allows(gap):
            raise ModelsDiffer(gap)
        return figures(tokens, mean)


def trained(judge: MismatchJudge | None, remote: Remote, updates: int = 1) -> None:
    learner: Any = BatchLearner(config(), remote, judge=judge)  # pyright: ignore[reportArgumentType]
    for update in range(updates):
        asyncio.run(learner.train(Batch(update, update, ())))


@pytest.fixture(autouse=True)
def _no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_opd.run.batch_learner.shares", lambda *_: [])


def test_a_refusal_ends_the_run_as_a_mistake_of_the_user_with_figure_limit_and_remedy():
    told: list[str] = []
    judge = judged("refuse", told)
    with pytest.raises(UserError) as refused:
        trained(judge, Remote((640, FAR)))
    end = FirstCause(list).end(LoopFailed("learn", refused.value), "; logs", lambda _: "kept")
    assert type(end) is UserError, "exit code 2"
    line = str(end)
    assert "\n" not in line
    for words in (
        *("learner.mismatch_limit refuse", "of update 0", "is 0.3 on average (limit 2.2e-05)"),
        *("k3 0.3 nats (limit 4.4e-09) over 640 tokens", "rope", "student.extra_args", "eps"),
        *("missing tensors", "another checkpoint", "experts", "opd mismatch"),
    ):
        assert words in line
    summary = judge.summary()
    assert summary["first_mismatch_verdict"] == "exceeds limits"
    assert summary["first_mismatch_mean_abs_dp"] == pytest.approx(FAR)
    assert summary.keys() == NOT_JUDGED.keys()


def test_the_first_updates_with_own_tokens_are_judged_until_there_were_enough():
    told: list[str] = []
    judge, remote = judged("refuse", told), Remote((0, 0.0), (600, NEAR), (600, NEAR), (9, FAR))
    trained(judge, remote, 2)
    assert judge.summary()["first_mismatch_tokens"] == 600
    trained(judge, remote, 2)
    seen = [None if bound is None else bound.before.tokens for bound in remote.bounds]
    assert seen == [0, 0, 600, None], "then learning may move the two apart"
    assert ENOUGH <= 1200
    assert judge.summary()["first_mismatch_verdict"] == "within limits"
    (line,) = told
    assert line.endswith("over 600 tokens: within limits")


def test_a_warning_is_one_line_and_stops_nothing():
    told: list[str] = []
    judge, remote = judged("warn", told), Remote((640, FAR), (640, FAR))
    trained(judge, remote, 2)
    assert remote.bounds == [None, None]
    (line,) = told
    assert line.startswith("warning: learner.mismatch_limit: at update 0, ")
    assert "student.extra_args" in line
    assert judge.summary()["first_mismatch_verdict"] == "exceeds limits"


def test_nothing_is_judged_where_it_is_off_or_cannot_be_compared():
    cut = config().rollout.model_copy(update={"top_p": 0.9})
    assert judge_of("off", []) is judge_of("refuse", [], rollout=cut) is None
    remote = Remote((640, FAR))
    trained(None, remote)
    assert remote.bounds == [None]
    assert {key for key in OFF if OFF[key] != NOT_JUDGED[key]} == {"first_mismatch_verdict"}
    assert judged("refuse", []).summary() == NOT_JUDGED, "no update was made"


def test_a_note_says_at_the_start_why_nothing_is_judged():
    def lines(action: str, top_p: float) -> list[str]:
        base = config()
        changed: dict[str, Any] = {
            "learner": base.learner.model_copy(update={"mismatch_limit": action}),
            "rollout": base.rollout.model_copy(update={"top_p": top_p}),
        }
        made: Config = base.model_copy(update=changed)
        return [line for line in notes(made) if "mismatch_limit" in line]

    (line,) = lines("refuse", 0.9)
    assert line.startswith("learner.mismatch_limit refuse has no effect: rollout.top_p is 0.9: ")
    assert lines("refuse", 1.0) == lines("off", 0.9) == []
