"""Which ended process explains an error, and which error is told."""

import asyncio
import itertools
from typing import Any

import pytest

from megatron_opd.controller.errors import LoopFailed
from megatron_opd.data.faults import BadRows
from megatron_opd.errors import LearnerError, PartGone, RunFailed, UserError
from megatron_opd.fleet.ends import FirstCause, explained
from megatron_opd.launch.health import EngineLost, ProcessDied, WatchedProcess
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import (
    BadReply,
    RankFailed,
    ServerRefused,
    ServerUnreachable,
    WeightSyncFailed,
)

STUDENT, TEACHER = "http://h:1", "http://h:2"
GONE = LearnerError("rank 0 is gone", final=False)
RESET = ServerUnreachable(TEACHER, "/g", "reset", sent=True)


def processes(student: int | None, teacher: int | None, learner: int | None) -> list[Any]:
    return [
        WatchedProcess("the learner", lambda: learner, follows=(3,)),
        WatchedProcess("student", lambda: student, url=STUDENT),
        WatchedProcess("teacher", lambda: teacher, url=TEACHER),
    ]


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RESET, "teacher"),
        (ServerRefused(TEACHER, "/g", 500, "scheduler is gone"), "teacher"),
        (ServerRefused(TEACHER, "/g", 401, "key"), None),
        (BadReply(f"{TEACHER}: not finite"), None),
        (LearnerError("rank 0: out of memory"), None),
        (GONE, "the learner"),
        (LoopFailed("score", RESET), "teacher"),
        (LoopFailed("learn", LearnerError("rank 0: the loss is nan")), None),
        (ExceptionGroup("tasks", [RESET, GONE]), "teacher"),
        (ExceptionGroup("tasks", [ValueError("first"), GONE]), None),
        (WeightSyncFailed("send: a peer left"), "student"),
        (caused(WeightSyncFailed("send: gone"), GONE), "the learner"),
        (caused(WeightSyncFailed("verify: other"), BadReply("x")), None),
        (RankFailed("rank 0 lost a peer", peer_lost=True), "student"),
        (RankFailed("rank 0: bad share"), None),
        (caused(PartGone("gone"), GONE), "the learner"),
        (caused(UserError("the learner did not start: gone"), GONE), "the learner"),
        (UserError("data.train: not there"), None),
        (EngineLost(f"student server {STUDENT} is gone"), "student"),
        (EngineLost("student server http://far:9 is gone"), None),
        (ProcessDied("the learner ended with exit code 1"), "student"),
        (ConnectionResetError(104, "reset"), "student"),
        (KeyError("x"), None),
    ],
)
def test_what_explains_an_error(error: Exception, found: str | None):
    """The student's server was killed, the others ended because of that."""
    end = run_virtual(explained(error, processes(-9, 1, 1)))
    assert (end and str(end).partition(" ended")[0]) == found


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ((-9, None, 3), "student"),
        ((-9, 1, 1), "student"),
        ((1, None, -9), "the learner"),
        ((1, None, 3), "student"),
        ((1, None, 1), "student"),
        ((None, None, 3), "the learner"),
    ],
)
def test_of_several_ends_the_likeliest_cause_of_the_others(
    codes: tuple[int | None, int | None, int | None], first: str, order: tuple[int, ...]
):
    watched = processes(*codes)
    end = run_virtual(explained(TimeoutError(), [watched[i] for i in order]))
    assert str(end).startswith(f"{first} ended")


def test_the_end_of_a_process_is_awaited_for_a_moment():
    codes = iter([None, None, -9])
    watched = [WatchedProcess("teacher", lambda: next(codes, -9), url=TEACHER)]
    assert "teacher ended with signal 9" in str(run_virtual(explained(RESET, watched)))
    alive = [WatchedProcess("teacher", lambda: None, url=TEACHER)]
    assert run_virtual(explained(RESET, alive)) is None


def test_the_first_error_is_told_and_what_ends_later_is_not():
    code: list[int] = []
    learner = WatchedProcess("the learner", lambda: code[0] if code else None, follows=(3,))

    async def main() -> FirstCause:
        ends = FirstCause(lambda: [learner])

        async def work() -> None:
            raise TimeoutError("too late")

        async def close() -> None:
            code.append(3)
            raise OSError("close")

        with pytest.raises(TimeoutError):
            await ends.of(ends.of(work()))
        with pytest.raises(OSError, match="close"):
            await ends.closing(close)()
        return ends

    ends = run_virtual(main())
    end = ends.end(OSError("close"), "; logs", lambda error: f"kept of {error}")
    assert isinstance(end, RunFailed)
    assert str(end) == "TimeoutError: too late; kept of too late"


def test_what_closes_at_once_is_called_and_its_error_is_the_cause_too():
    ends, closed = FirstCause(list), list[str]()
    run_virtual(ends.closing(lambda: closed.append("part"))())
    assert (closed, ends.first) == (["part"], None)

    def fail() -> None:
        raise OSError("close")

    with pytest.raises(OSError, match="close"):
        run_virtual(ends.closing(fail)())
    assert isinstance(ends.first, OSError)


@pytest.mark.parametrize(
    ("first", "kind", "told"),
    [
        (UserError("key: bad\nits log"), UserError, "key: bad\nits log"),
        (BadReply("http://h:1: html"), RunFailed, "http://h:1: html; see"),
        (RunFailed("it cannot"), RunFailed, "it cannot; see"),
        (KeyError("what"), RunFailed, "KeyError: 'what'; kept"),
        (asyncio.CancelledError(), KeyboardInterrupt, ""),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_what_a_command_ends_with(first: BaseException, kind: type[BaseException], told: str):
    end = FirstCause(list).end(first, "; see", lambda _: "kept")
    assert (type(end), str(end)) == (kind, told)


def test_rows_that_a_run_cannot_go_on_with_are_the_users_mistake():
    ends = FirstCause(list)
    error = ExceptionGroup("tasks", [LoopFailed("admit", BadRows("data.train: 3 of 9 rows"))])
    told, last = ends.failure(error, "; logs", lambda _: "kept")
    assert told == str(last) == "data.train: 3 of 9 rows"
    assert isinstance(last, UserError)
