"""What a simulated user says is asked of a teacher's servers, in several tries."""

import numpy as np
import pytest

from megatron_opd.config.environment import UserConfig
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.user import SpokenTurn
from megatron_opd.records.drops import (
    TEACHER_BAD_REPLY,
    TEACHER_REFUSED,
    TEACHER_TIMED_OUT,
    TEACHER_UNAVAILABLE,
    TEACHER_UNREACHABLE,
)
from megatron_opd.rollout.user_voice import TeacherVoice
from megatron_opd.sim.clock import run_virtual
from sglang_bridge.errors import BadReply, BridgeError, ServerRefused, ServerUnreachable
from sglang_bridge.protocol import RolloutReply, RolloutRequest

USER = UserConfig(max_user_tokens=9, temperature=0.5)
URL = "http://t:1"


class Servers:
    """Fails with these errors, then answers."""

    def __init__(self, *errors: BridgeError) -> None:
        self._errors = iter(errors)
        self.requests: list[tuple[RolloutRequest, str]] = []

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        self.requests.append((request, prefer))
        error = next(self._errors, None)
        if error is not None:
            raise error
        return RolloutReply(np.array([4, 5], np.int32), "stop", None, ((0, 0, 2),), URL)


def say(servers: Servers) -> SpokenTurn:
    voice = TeacherVoice(USER, 3, servers, (7, 8))
    return run_virtual(voice([1, 2, 3], 11, "http://t:0"))


def test_a_turn_is_plain_text_by_its_seed_from_the_server_of_the_last():
    servers = Servers()
    assert say(servers) == SpokenTurn([4, 5], URL)
    ((request, prefer),) = servers.requests
    assert prefer == "http://t:0"
    assert list(request.input_ids) == [1, 2, 3]
    assert (request.seed, request.temperature, request.max_new_tokens) == (11, 0.5, 9)
    assert (request.stop, request.stop_token_ids) == ((), (7, 8))  # no tokenizer there
    assert not request.keeps_cache


LOST = ServerUnreachable(URL, "/generate", "reset", sent=True)
SILENT = ServerUnreachable(URL, "/generate", "slow", sent=True)
SILENT.__cause__ = TimeoutError()


def test_a_lost_turn_is_asked_again_by_the_same_seed_under_another_name():
    servers = Servers(LOST, ServerRefused(URL, "/generate", 503, "full"))
    assert say(servers).ids == [4, 5]
    assert len({request.rid for request, _ in servers.requests}) == 3
    assert {request.seed for request, _ in servers.requests} == {11}


@pytest.mark.parametrize(
    ("error", "tries", "reason"),
    [
        (LOST, 3, TEACHER_UNREACHABLE),
        (SILENT, 3, TEACHER_TIMED_OUT),
        (ServerRefused(URL, "/generate", 503, "full"), 3, TEACHER_UNAVAILABLE),
        (ServerRefused(URL, "/generate", 400, "no"), 1, TEACHER_REFUSED),
        (BadReply("no"), 1, TEACHER_BAD_REPLY),
    ],
)
def test_a_turn_that_no_server_gives_is_dropped_with_a_reason(
    error: BridgeError, tries: int, reason: str
):
    servers = Servers(*[error] * 3)
    with pytest.raises(EnvironmentFailed) as failed:
        say(servers)
    assert failed.value.reason == reason
    assert len(servers.requests) == tries
