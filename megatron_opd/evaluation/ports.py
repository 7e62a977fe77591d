"""Defines what samples from the model under evaluation, and does so on SGLang servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sglang_bridge.fleet import Fleet
from sglang_bridge.protocol import FinishReason, RolloutRequest
from sglang_bridge.retry import Backoff, is_unserved, retried


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds one sampled response.

    ids: token ids, the end token included when it was sampled. finish_reason: what ended it.
    versions: the oldest and the newest version of the weights that sampled it; None: unknown, or
    nothing was sampled. url: of the server that sampled it; empty: it has none.
    """

    ids: Sequence[int]
    finish_reason: FinishReason
    versions: tuple[int, int] | None = None
    url: str = ""


class CompletionPort(Protocol):
    """Samples from the model under evaluation."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a completion."""
        ...

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
        prefer: str = "",
    ) -> Completion:
        """Return a completion.

        stop: strings that end it, as soon as its text holds one. seed: the same one gives the same
        completion where completions are reproducible. prefer: by the server at this address, if it
        serves: it has the beginning of the prompt in its prefix cache.
        """
        ...


class FleetPort:
    """Completes prompts on SGLang servers, with request ids of its own and without draws.

    Where a fleet has servers for evaluations, these complete them. attempts: tries of a completion
    while servers do not answer. end_ids: the ids that end a completion.
    """

    def __init__(self, fleet: Fleet, attempts: int, end_ids: tuple[int, ...]) -> None:
        self._fleet, self._backoff, self._end_ids = fleet, Backoff(attempts), end_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a completion."""
        return self._end_ids

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
        prefer: str = "",
    ) -> Completion:
        """Ask the fleet for one completion. Raises what Fleet.generate raises."""

        async def once(_: int) -> Completion:
            request = RolloutRequest(
                rid=f"eval-{uuid.uuid4().hex}",
                input_ids=list(prompt_ids),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_token_ids=self._end_ids,
                stop=stop,
                seed=seed,
            )
            reply = await self._fleet.generate(request, evaluates=True, prefer=prefer)
            versions = [version for version, _, _ in reply.spans]
            span = (min(versions), max(versions)) if versions else None
            ids = reply.output_ids_T.tolist()
            return Completion(ids, reply.finish_reason, span, reply.url)

        return await retried(once, self._backoff, is_unserved)


class RespellingPort:
    """Completes prompts by a model of another tokenizer; ids of both ends are the student's.

    Args:
        port: samples from the model, in its own ids.
        read: the model's ids of each prompt, by the bytes of the student's (int32).
        respelt: turns a completion into the student's ids.
        end_ids: the student's.
    """

    def __init__(
        self,
        port: CompletionPort,
        read: Mapping[bytes, Sequence[int]],
        respelt: Callable[[Sequence[int]], Sequence[int]],
        end_ids: tuple[int, ...],
    ) -> None:
        self._port, self._read, self._respelt, self._end_ids = port, read, respelt, end_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a completion."""
        return self._end_ids

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop: tuple[str, ...],
        seed: int,
        prefer: str = "",
    ) -> Completion:
        """Ask for one completion. KeyError: a prompt that the model has not read."""
        found = await self._port.complete(
            self._read[np.array(prompt_ids, np.int32).tobytes()],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop=stop,
            seed=seed,
            prefer=prefer,
        )
        return replace(found, ids=self._respelt(found.ids))
