"""Trajectories played in this process, with servers that sample by a request's seed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from megatron_opd.config.schema import Config
from megatron_opd.environments.guarded import EnvironmentLimits, GuardedEnvironment
from megatron_opd.environments.hosted import HostedPlaying
from megatron_opd.environments.play import Player
from megatron_opd.environments.protocol import Said, TrajectoryEnd
from megatron_opd.environments.trajectory import TrajectoryLimits
from megatron_opd.records.types import Rollout, Sample
from megatron_opd.rollout.generator import RolloutGenerator
from megatron_opd.rollout.scores import unscored
from megatron_opd.rollout.trajectories import TrajectoryGenerator
from megatron_opd.transport.samples import encode_sample
from sglang_bridge.protocol import DrawCache, RolloutReply, RolloutRequest
from tests.support.chat_families import BY_NAME
from tests.support.config_files import minimal

FAMILY = BY_NAME["qwen2.5"]
"""Whose chat template is played with."""
WIDE = TrajectoryLimits(max_turns=8, max_tokens=10_000, max_turn_tokens=64)
END = FAMILY.ids("<|im_end|>")[0]
SAMPLING_S = 2.0


class Echoing:
    """Says how many characters each turn had, and ends after the fourth."""

    turns = 4

    async def start(self, row: Any) -> str:
        self._turns, self._seed = 0, row.seed
        return f"About {row.prompt}."

    async def step(self, reply: Any) -> Any:
        self._turns += 1
        if self._turns == self.turns:
            return TrajectoryEnd(1.0)
        return Said(f"turn {self._turns} of {len(reply.text)}, {self._seed % 100}", 0.5)


class InProcessHost:
    """Gives an environment of this process to each trajectory."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self.kind = kind

    @asynccontextmanager
    async def environment(self):
        yield GuardedEnvironment(self.kind(), EnvironmentLimits(1000.0, 2**20))


def played_here(kind: Callable[[], Any], limits: TrajectoryLimits = WIDE) -> HostedPlaying:
    """Plays with environments that `kind` makes."""
    player = Player(FAMILY.encoder(), None, limits)
    return HostedPlaying(InProcessHost(kind), player)  # type: ignore[arg-type]


class SeededServers:
    """Samples by seed, with the version that it has; each token beside the id above it."""

    def __init__(self, version: int = 0) -> None:
        self.requests: list[RolloutRequest] = []
        self.version = version

    async def generate(self, request: RolloutRequest, *, prefer: str = "") -> RolloutReply:
        self.requests.append(request)
        await asyncio.sleep(SAMPLING_S)
        assert request.seed is not None
        rng = np.random.default_rng(request.seed % 2**63)
        ids_T = np.append(rng.integers(5, 90, rng.integers(1, 6)), END).astype(np.int32)
        count = len(ids_T)
        draws = DrawCache(
            offsets_T1=np.arange(count + 1, dtype=np.int64) * 2,
            ids_N=np.stack([ids_T, ids_T + 1], 1).flatten().astype(np.int32),
            path_T=np.arange(count, dtype=np.int64) * 2,
            weight_N=np.full(2 * count, 0.5, np.float32),
            sampler_logp_N=-rng.random(2 * count, np.float32),
        )
        inputs = len(request.input_ids) + count - 1
        experts = rng.integers(0, 8, (inputs, 2, 1)).astype(np.uint8)
        gates = rng.random((inputs, 2, 1), np.float32)
        spans = ((self.version, 0, count),)
        return RolloutReply(ids_T, "stop", draws, spans, "http://a:1", experts, gates)


def config() -> Config:
    return minimal(support={"type": "mc", "m": 4}, rollout={"concurrency": 2})


def trajectories(servers: SeededServers, kind: type[Any] = Echoing) -> TrajectoryGenerator:
    turns = RolloutGenerator(config(), servers, 400, "run7", (END,))
    return TrajectoryGenerator(turns, servers, played_here(kind), config().run.seed)


def everything(rollout: Rollout | Sample) -> tuple[Any, ...]:
    """All that is trained on, as bytes, with versions and rewards; times are not."""
    sample = rollout if isinstance(rollout, Sample) else unscored(rollout)
    found = sample.rollout
    turns = tuple((turn.calls, turn.call_errors, turn.reward) for turn in found.turns)
    return (
        [bytes(frame) for frame in encode_sample(sample)],
        found.spans,
        found.finish_reason,
        found.reward,
        found.restarts,
        turns,
    )
