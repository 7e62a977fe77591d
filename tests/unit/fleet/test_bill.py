"""What teachers cost that are paid for by the token, counted over every answered request."""

import asyncio

import pytest

from megatron_opd.fleet.bill import billed
from megatron_opd.fleet.clients import make_fleet
from sglang_bridge.errors import ServerRefused
from tests.support.config_files import minimal
from tests.support.foreign_server import IDS, ForeignServer, busy, score_request


def test_tokens_of_answered_requests_are_paid_for():
    async def run() -> None:
        async with ForeignServer("vllm", [lambda: busy(503)]).up() as server:
            section = {"model": "m", "urls": [server.url], "api": "openai"}
            config = minimal(
                support={"type": "path"}, teacher=section | {"cost_per_million_tokens": 250.0}
            )
            assert config.teacher is not None
            fleet = make_fleet(config.teacher, config.teacher.urls)
            async with fleet:
                with pytest.raises(ServerRefused, match="503"):
                    await fleet.score(score_request())
                for _ in range(2):
                    await fleet.score(score_request())
                tokens = 2 * (len(IDS) + 1)  # one more is sampled; the busy answer costs nothing
                found = billed(config, {"teacher": fleet})
                assert found == {
                    "teacher_billed_tokens": tokens,
                    "teacher_cost": tokens * 250.0 / 1e6,
                }
                fleet.drop(server.url)
                assert billed(config, {"teacher": fleet}) == found, "what is lost was paid for"
            unpriced = minimal(support={"type": "path"}, teacher=section)
            assert billed(unpriced, {"teacher": fleet}) == {}

    asyncio.run(run())
