"""Breaks one rule of a controller, for the controls, which must fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_opd.buffer.completion import CompletionBuffer
from megatron_opd.buffer.rejection import RolloutRejected, SampleRejected
from megatron_opd.buffer.spread import GroupVerdict
from megatron_opd.controller.controller import Controller
from megatron_opd.records.types import Prompt


def broken(controller: Any, control: str | None) -> None:
    """Break the rule that `control` names; "tight_bound" breaks none, it is for the checks."""
    if control == "early_permits":
        _release_when_trained(controller)
    elif control == "no_deadlines" and isinstance(controller._buffer, CompletionBuffer):
        controller._buffer._musts = lambda: iter(())
    elif control == "kept_permits":
        controller._forget = _keeping(controller)
    elif control == "permits_of_turns":
        _release_while_answering(controller)
    elif control == "verdicts_as_scored" and controller._filter is not None:
        _judge_as_scored(controller._filter)


def _judge_as_scored(judge: Any) -> None:
    """Count groups without spread in the order in which they were scored."""
    completed = judge.completed

    def at_once(prompt: Prompt) -> list[GroupVerdict]:
        judge._next = prompt.uid // judge._size
        judge._found.clear()
        return completed(prompt)

    judge.completed = at_once


def _release_when_trained(controller: Any) -> None:
    """Return permits at the end of an update, and not when its weights are live (R4)."""
    permits, train = controller._permits, controller._ports.learner.train
    release = permits.release

    async def trained(batch: Any) -> Any:
        figures = await train(batch)
        release(sample.rollout.prompt.uid for sample in batch.samples)
        return figures

    def held(uids: Iterable[int]) -> None:
        release([uid for uid in uids if uid in permits._holders])

    permits.release = held
    controller._ports.learner.train = trained


def _release_while_answering(controller: Any) -> None:
    """Let a trajectory hold a permit only while a turn of it is sampled (R1)."""
    permits, servers = controller._permits, controller._ports.rollout
    answer = servers.answer

    async def answered(uid: int) -> None:
        permits.release([uid])
        try:
            await answer(uid)
        except RolloutRejected:
            await permits.acquire(uid)
            raise
        await permits.acquire(uid)

    servers.answer = answered


def _keeping(controller: Controller) -> Any:
    """Let a dropped sample keep its permit (R3)."""
    forget, permits = controller._forget, controller._permits

    def without(uid: int, rejection: SampleRejected) -> None:
        release = permits.release
        permits.release = lambda uids: None  # type: ignore[method-assign]
        try:
            forget(uid, rejection)
        finally:
            permits.release = release  # type: ignore[method-assign]

    return without
