"""Defines what the two parts of the disk transport say to each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from megatron_opd.wire.codec import Codec
from sglang_bridge.errors import WeightSyncFailed


class Open(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to prepare for versions in the directory `stream`; answered with Written(0).

    owner: names the run; what an earlier one of the same name left is removed. dtype: torch's name
    of what the servers' parameters are.
    """

    stream: str
    owner: str
    dtype: str


class Write(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to write the current weights as version `name`; answered with Written.

    version: of the weights. whole: not as changes, for servers may not hold the last one. taken:
    the newest version that every server holds; older ones may be deleted.
    """

    name: str
    version: int
    whole: bool
    taken: str | None


class Written(msgspec.Struct, frozen=True, tag=True):
    """Says that it is done, and how many bytes were written."""

    num_bytes: int


class DiskRefused(msgspec.Struct, frozen=True, tag=True):
    """Says in one line why it could not be done; the learner goes on."""

    cause: str


Message = Open | Write | Written | DiskRefused

_CODEC = Codec[Message](Message)
encode, decode = _CODEC.encode, _CODEC.decode
"""For a request or its answer. BadMessage: it is anything else."""


async def num_written(ask: Callable[[bytes], Awaitable[bytes]], request: Open | Write) -> int:
    """Return the bytes that the learner wrote when asked. WeightSyncFailed: it refused."""
    answer = decode(await ask(encode(request)))
    if isinstance(answer, DiskRefused):
        raise WeightSyncFailed(f"the learner: {answer.cause}")
    assert isinstance(answer, Written)
    return answer.num_bytes
