"""Makes all ranks agree on whether a share can be trained on, before any of them begins.

Ranks read different parts of a share, so one may refuse what another cannot see. One that ended
alone would leave the others in a collective of the update until their controller is gone.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import torch
import torch.distributed as dist

from megatron_opd.data.template import this_moment
from megatron_opd.learner.world import World
from sglang_bridge.errors import one_line

WORDS_BYTES = 4000
EPOCH = datetime(1970, 1, 1)


def agree(refused: ValueError | None, lacks: bool, world: World) -> bool:
    """Return whether no rank lacks its part. ValueError, on every rank: some rank refuses its part.

    Collective over the world. refused: why this rank does. The words are those of the first rank
    that does, whichever tells the controller first.
    """
    state = torch.tensor(
        [world.size if refused is None else world.rank, int(not lacks)], device=world.device
    )
    if world.size > 1:
        dist.all_reduce(state, dist.ReduceOp.MIN)
    first, complete = state.tolist()
    if first < world.size:
        raise ValueError(_words(refused, first, world)) from refused
    return bool(complete)


def agreed_moment(world: World) -> datetime:
    """Return the local time of rank 0 in whole seconds, on every rank. Collective."""
    seconds = torch.tensor([(this_moment() - EPOCH) // timedelta(seconds=1)], device=world.device)
    if world.size > 1:
        dist.broadcast(seconds, src=0)
    return EPOCH + timedelta(seconds=int(seconds.item()))


def _words(refused: ValueError | None, first: int, world: World) -> str:
    """Return what rank `first` says, on every rank. Collective over the world."""
    said = b"" if refused is None else one_line(str(refused), 1000).encode()[:WORDS_BYTES]
    words = torch.frombuffer(bytearray(said.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
    if world.size > 1:
        words = words.to(world.device)
        dist.broadcast(words, src=first)
    return bytes(words.cpu().numpy()).rstrip(b"\0").decode(errors="replace")
