"""Defines what the two parts of the shards transport say to each other."""

from __future__ import annotations

import msgspec

from megatron_opd.wire.codec import Codec


class ListenForShards(msgspec.Struct, frozen=True, tag=True):
    """Asks rank 0 to listen for a group of `world_size` ranks; it answers with Listening."""

    world_size: int
    timeout_s: float


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Says where rank 0 listens, and with what backend of torch.distributed the group is formed.

    host: the learner's own weight_sync.host, which may be another node's after a restart. gpus: of
    each rank, as sglang_bridge/weights/device_lane.gpu_of names it; "" on a CPU.
    """

    host: str
    port: int
    backend: str
    gpus: tuple[str, ...]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to plan and to form the group, as its first ones.

    servers: (url, tp, ep) of each, in order. dtype: torch's name of what their parameters are.
    same_host: whether all ranks find out then who is on one host (sglang_bridge/weights/same_host).
    near: see sglang_bridge/weights/message_order.Limits.
    """

    host: str
    port: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float
    servers: tuple[tuple[str, int, int], ...]
    dtype: str
    same_host: bool
    near: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to leave the group, if they are in one."""


class SendOutcome(msgspec.Struct, frozen=True, tag=True):
    """Answers Join and what lets ranks send. failures: one line of each rank that failed, in order.

    After a failure no rank is in the group any more.
    """

    failures: tuple[str, ...]


class SendShards(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to send what the plan gives them, once: what is staged, or the rest."""

    staged: bool


class StartSending(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks to copy their weights as `version`, unless the copy is that version already.

    A thread of each then sends all that the plan gives its rank, what is staged first; the ranks
    answer when it has begun. A later request waits for its end.
    """

    version: int


class FinishSending(msgspec.Struct, frozen=True, tag=True):
    """Asks all ranks whether all that StartSending began was sent."""


Message = (
    ListenForShards
    | Listening
    | Join
    | Leave
    | SendShards
    | StartSending
    | FinishSending
    | SendOutcome
)

_CODEC = Codec[Message](Message)
encode, decode = _CODEC.encode, _CODEC.decode
"""For a request or its answer. BadMessage: it is anything else."""
