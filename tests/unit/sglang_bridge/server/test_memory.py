"""A rank gives up memory only when it may, and takes back only what it gave up."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bridge import wire
from sglang_bridge.server import memory
from sglang_bridge.server.compat import ranks

BOTH = list(wire.MEMORY_TAGS)


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without SGLang, which takes seconds to import."""
    monkeypatch.setattr(ranks, "memory_request", lambda what, tags: SimpleNamespace(tags=tags))


class Updater:
    """SGLang's part of it, with the failures that would end a scheduler."""

    def __init__(self, *, saves: bool, idle: bool) -> None:
        self.offload_tags: set[str] = set()
        self.memory_saver_adapter = SimpleNamespace(enabled=saves)
        self.idle, self.calls = idle, []

    def is_fully_idle(self, *, ignore_waiting: bool) -> bool:
        return self.idle or ignore_waiting

    def release_memory_occupation(self, request: Any) -> None:
        assert self.idle or self.scheduler._engine_paused, "not idle"
        self.calls.append(("release", *request.tags))
        self.offload_tags.update(request.tags)

    def resume_memory_occupation(self, request: Any) -> None:
        self.calls.append(("resume", *request.tags))
        for tag in request.tags:
            self.offload_tags.remove(tag)  # KeyError, as there


def rank(
    *, saves: bool = True, backup: bool = True, idle: bool = True, paused: bool = False
) -> Any:
    updater = Updater(saves=saves, idle=idle)
    updater.scheduler = SimpleNamespace(
        weight_updater=updater,
        server_args=SimpleNamespace(enable_weights_cpu_backup=backup),
        _engine_paused=paused,
    )
    return updater.scheduler


def test_what_is_given_up_comes_back_and_either_may_be_asked_twice():
    scheduler = rank()
    for _ in range(2):
        assert memory.release(scheduler, BOTH) == {
            wire.RELEASED: "kv_cache,weights",
            wire.FREED: "kv_cache,weights",
        }
    for _ in range(2):
        assert memory.resume(scheduler, [wire.WEIGHTS])[wire.RELEASED] == "kv_cache"
    assert memory.resume(scheduler, BOTH)[wire.RELEASED] == ""
    assert memory.resume(scheduler, BOTH)[wire.RELEASED] == ""
    assert scheduler.weight_updater.calls == [
        ("release", "kv_cache", "weights"),
        ("resume", "weights"),
        ("resume", "kv_cache"),
    ]


def test_a_busy_rank_is_asked_again():
    scheduler = rank(idle=False)
    assert memory.release(scheduler, BOTH) == {wire.PENDING: ""}
    assert scheduler.weight_updater.calls == []
    scheduler.weight_updater.idle = True
    assert memory.release(scheduler, BOTH)[wire.RELEASED] == "kv_cache,weights"


def test_requests_of_a_paused_rank_are_no_work():
    assert wire.PENDING not in memory.release(rank(idle=False, paused=True), BOTH)


@pytest.mark.parametrize(
    ("saves", "backup", "released", "freed"),
    [
        (True, True, "kv_cache,weights", "kv_cache,weights"),
        (True, False, "kv_cache", "kv_cache"),  # they would be lost
        (False, False, "kv_cache,weights", ""),  # a CPU: nothing happens to them
    ],
)
def test_weights_are_given_up_only_where_they_survive(
    saves: bool, backup: bool, released: str, freed: str
):
    found = memory.release(rank(saves=saves, backup=backup), BOTH)
    assert found == {wire.RELEASED: released, wire.FREED: freed}
