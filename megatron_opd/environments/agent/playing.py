"""Runs trajectories with agents: each in a process, on a key of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from megatron_opd.environments.agent.endpoint import AgentEndpoint
from megatron_opd.environments.agent.hosting import AgentHost, AgentProcess
from megatron_opd.environments.agent.recorder import AgentTrajectory, Student
from megatron_opd.environments.failed import EnvironmentFailed
from megatron_opd.environments.play import Played, TurnSampler
from megatron_opd.environments.protocol import EnvironmentRow
from megatron_opd.records.drops import ENVIRONMENT_FAILED


@dataclass(frozen=True, slots=True)
class AgentPlaying:
    """Runs trajectories with an agent; see Playing.

    host, endpoint: start and serve it, and have been entered. timeout_s: see AgentTrajectory.
    """

    host: AgentHost
    endpoint: AgentEndpoint
    student: Student
    timeout_s: float

    async def play(self, row: EnvironmentRow, sample: TurnSampler) -> Played:
        """Run one trajectory; see Playing."""
        async with self.host.agent() as agent:
            trajectory = AgentTrajectory(self.student, sample, self.timeout_s)
            try:
                with self.endpoint.serving(trajectory) as key:
                    reward = await self._reward(agent, key, row, trajectory)
            finally:
                await trajectory.close()
        return trajectory.played(reward)

    async def _reward(
        self, agent: AgentProcess, key: str, row: EnvironmentRow, trajectory: AgentTrajectory
    ) -> float | None:
        """Return what the agent returns. EnvironmentFailed; what broke the trajectory."""
        loop = asyncio.get_running_loop()
        running = loop.create_task(agent.run(self.endpoint.base_url, key, row), name="agent")
        try:
            waited = {running, trajectory.broken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if trajectory.broken.done():
                trajectory.broken.result()
            return running.result()
        except EnvironmentFailed as failed:
            # an agent need not catch the refusal that says that a limit has ended its trajectory
            if failed.reason == ENVIRONMENT_FAILED and trajectory.limit is not None:
                return None
            raise
        finally:
            running.cancel()
