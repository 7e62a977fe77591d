"""Carries errors of a data worker's calls to the controller, where they mean the same.

A fleet repeats, rests servers and counts by the kind of an error, so each arrives as what it was,
its texts as lines that may be printed.
"""

from __future__ import annotations

import msgspec

from megatron_opd.buffer.rejection import RolloutRejected, SamplesLost, ScoreRejected
from megatron_opd.data.verifiers.reward import VerifierFailed
from megatron_opd.data_workers.messages import CallFailed
from megatron_opd.records.turns import NotReplayed
from sglang_bridge.errors import (
    BadReply,
    BridgeError,
    RequestAborted,
    ServerRefused,
    ServerUnreachable,
    one_line,
)

LONGEST_REASON = 40


class WorkerFailed(RuntimeError):
    """Reports in one line an error of a data worker that no other kind stands for."""


def failed(call: int, error: BaseException) -> CallFailed:
    """Describe an error of a call."""
    found = _described(call, error)
    return msgspec.structs.replace(found, texts=[one_line(text) for text in found.texts])


def _described(call: int, error: BaseException) -> CallFailed:
    match error:
        case ServerUnreachable():
            flags = [error.sent, error.stalled, error.timed_out]
            return CallFailed(call, "unreachable", [error.url, error.path, error.cause], flags)
        case ServerRefused():
            texts = [error.url, error.path, error.body]
            return CallFailed(call, "refused", texts, [], error.status)
        case BadReply():
            return CallFailed(call, "bad reply", [str(error)], [])
        case RequestAborted():
            return CallFailed(call, "aborted", [str(error)], [])
        case RolloutRejected():
            return CallFailed(call, "no rollout", [error.reason, error.detail], [])
        case ScoreRejected():
            return CallFailed(call, "no score", [error.reason, error.detail], [])
        case NotReplayed():
            return CallFailed(call, "not replayed", [str(error)], [])
        case VerifierFailed():
            return CallFailed(call, "verifier", [error.reason, error.detail], [])
        case SamplesLost():
            return CallFailed(call, "lost", [str(error)], [])
        case _:
            return CallFailed(call, "", [f"{type(error).__name__}: {error}"], [])


def as_error(fault: CallFailed) -> Exception:
    """Return the error that `failed` described."""
    texts = [one_line(text) for text in fault.texts]
    match fault.kind, len(texts), len(fault.flags):
        case "unreachable", 3, 3:
            return _unreachable(texts, fault.flags)
        case "refused", 3, 0:
            return ServerRefused(texts[0], texts[1], fault.status, texts[2])
        case "bad reply", 1, 0:
            return BadReply(texts[0])
        case "aborted", 1, 0:
            return RequestAborted(texts[0])
        case "no rollout" | "no score" | "verifier", _, _ if not _is_word(texts):
            return WorkerFailed(one_line(f"a reason that is none: {' '.join(texts)}"))
        case "no rollout", 2, 0:
            return RolloutRejected(texts[0], texts[1])
        case "no score", 2, 0:
            return ScoreRejected(texts[0], texts[1])
        case "verifier", 2, 0:
            return VerifierFailed(texts[0], texts[1])
        case "not replayed", 1, 0:
            return NotReplayed(texts[0])
        case "lost", 1, 0:
            return SamplesLost(texts[0])
        case _:
            return WorkerFailed(one_line(" ".join(texts)) or "for no reason")


def _is_word(texts: list[str]) -> bool:
    """Return whether the first text can be a reason, by which metrics count."""
    return bool(texts) and texts[0].isidentifier() and len(texts[0]) <= LONGEST_REASON


def _unreachable(texts: list[str], flags: list[bool]) -> BridgeError:
    sent, stalled, timed_out = flags
    error = ServerUnreachable(*texts, sent=sent, stalled=stalled)
    if timed_out:
        error.__cause__ = TimeoutError(texts[2])
    return error
