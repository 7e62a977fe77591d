"""An error of a data worker means the same to the controller."""

import pytest

from megatron_opd.buffer.rejection import RolloutRejected, SamplesLost, ScoreRejected
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data_workers.faults import WorkerFailed, as_error, failed
from megatron_opd.data_workers.messages import CallFailed, decode_answer, encode
from sglang_bridge.errors import BadReply, RequestAborted, ServerRefused, ServerUnreachable


def silent(stalled: bool) -> ServerUnreachable:
    error = ServerUnreachable("http://h:1", "/generate", "no progress", sent=True, stalled=stalled)
    error.__cause__ = TimeoutError("no progress")
    return error


ERRORS = [
    ServerUnreachable("http://h:1", "/generate", "reset", sent=False),
    ServerUnreachable("http://h:1", "/generate", "reset", sent=True),
    silent(stalled=False),
    silent(stalled=True),
    ServerRefused("http://h:1", "/score", 503, "busy"),
    BadReply("http://h:1: 3 scores for 4 ids"),
    RequestAborted("http://h:1: r was aborted"),
    RolloutRejected("empty_response", "prompt 3"),
    ScoreRejected("teacher_nan", "2 of 9 scores"),
    VerifierFailed("timeout", "after 3 s"),
    SamplesLost("r-1 is not held"),
]
FIELDS = ("url", "path", "cause", "sent", "stalled", "timed_out", "status", "body")


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__}-{e}")
def test_an_error_arrives_as_what_it_was(error: Exception):
    answer = decode_answer(encode(failed(7, error)))
    assert isinstance(answer, CallFailed)
    assert answer.call == 7
    found = as_error(answer)
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name in (*FIELDS, "reason", "detail", "peer_lost"):
        assert getattr(found, name, None) == getattr(error, name, None), name


def test_any_other_error_is_one_line_that_names_it():
    found = as_error(failed(1, KeyError("x\n\x1b[31mred")))
    assert type(found) is WorkerFailed
    assert str(found).startswith("KeyError: ")
    assert not {"\n", "\x1b"} & set(str(found))


@pytest.mark.parametrize(
    "kind",
    [
        "unreachable",
        "refused",
        "bad reply",
        "aborted",
        "no rollout",
        "no score",
        "verifier",
        "lost",
    ],
)
def test_a_description_that_cannot_be_is_a_worker_that_failed(kind: str):
    for texts, flags in (([], []), (["a"] * 4, []), (["a"] * 3, [True] * 2)):
        assert type(as_error(CallFailed(1, kind, texts, flags))) is WorkerFailed


@pytest.mark.parametrize("kind", ["no rollout", "no score", "verifier"])
@pytest.mark.parametrize("reason", ["", "\x1b[2J", "two words", "a" * 41])
def test_a_reason_by_which_nobody_can_count_is_a_worker_that_failed(kind: str, reason: str):
    found = as_error(CallFailed(1, kind, [reason, "why"], []))
    assert type(found) is WorkerFailed
    assert str(found).isprintable()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_texts_are_lines_on_both_ends(error: Exception):
    hostile = failed(7, error)
    texts = ["teacher_nan", *["\x1b[2J\nx" for _ in hostile.texts[1:]]]
    found = as_error(CallFailed(7, hostile.kind, texts, hostile.flags, hostile.status))
    assert type(found) is type(error)
    assert str(found).isprintable()
    assert failed(7, ScoreRejected("teacher_nan", "\ud800\n")).texts[1].isprintable()
