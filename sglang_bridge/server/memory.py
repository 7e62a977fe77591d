"""Gives up the memory of one rank while its server is idle, and takes it back.

SGLang's own methods do it. They end the scheduler that is not idle, or is asked for what it never
gave up: here the first is answered with wire.PENDING and the second does nothing, so that a request
for either may be repeated. Every rank of a server decides alike, because all see the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_bridge import wire
from sglang_bridge.server.compat import ranks


def release(scheduler: Any, tags: Sequence[str]) -> dict[str, str]:
    """Gives up what `tags` name (wire.MEMORY_TAGS) and answers what was freed: see `facts`.

    Weights are given up only where the server keeps a copy of them in host memory, so that they
    are whole again whatever happens to the run.
    """
    updater = scheduler.weight_updater
    kept = set() if restores_weights(scheduler) else {wire.WEIGHTS}
    wanted = [tag for tag in tags if tag not in updater.offload_tags and tag not in kept]
    if wanted:
        if not updater.is_fully_idle(ignore_waiting=scheduler._engine_paused):
            return {wire.PENDING: ""}
        updater.release_memory_occupation(ranks.memory_request("Release", wanted))
    return facts(scheduler)


def resume(scheduler: Any, tags: Sequence[str]) -> dict[str, str]:
    """Takes back what `tags` name, as far as it was given up."""
    updater = scheduler.weight_updater
    wanted = [tag for tag in tags if tag in updater.offload_tags]
    if wanted:
        updater.resume_memory_occupation(ranks.memory_request("Resume", wanted))
    return facts(scheduler)


def facts(scheduler: Any) -> dict[str, str]:
    """Describes this rank: what is given up now, and which of it frees memory of a GPU."""
    updater = scheduler.weight_updater
    freed = wire.MEMORY_TAGS if updater.memory_saver_adapter.enabled else ()
    if not restores_weights(scheduler):
        freed = tuple(tag for tag in freed if tag != wire.WEIGHTS)
    return {
        wire.RELEASED: ",".join(sorted(updater.offload_tags)),
        wire.FREED: ",".join(freed),
    }


def restores_weights(scheduler: Any) -> bool:
    """Returns whether weights survive their release: they are copied, or nothing is released."""
    if not scheduler.weight_updater.memory_saver_adapter.enabled:
        return True
    return bool(scheduler.server_args.enable_weights_cpu_backup)
