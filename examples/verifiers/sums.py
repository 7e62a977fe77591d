"""An environment of the `verifiers` package that needs nothing but itself: sums, made here.

A task is a sum. The student has `tries` answers, and is told to try again after a wrong one; with
`calculator` it has a tool, too. The reward is 1 for a last number that is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

NUMBER = re.compile(r"-?\d+")
EXPRESSION = re.compile(r"\s*(-?\d{1,18})\s*([+-])\s*(-?\d{1,18})\s*")


class SumData(vf.TaskData):
    """Holds a sum's result beside its prompt."""

    answer: int


class CalculatorTools(vf.Toolset[vf.ToolsetConfig]):
    """Computes sums for the student, in a process of its own."""

    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Compute a sum or a difference of two whole numbers, such as 12+5."""
        found = EXPRESSION.fullmatch(expression)
        if found is None:
            return "error: it must be a sum or a difference of two whole numbers"
        left, sign, right = found.groups()
        return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


class SumTaskConfig(vf.TaskConfig):
    """Says what helps the student. calculator: a tool."""

    calculator: bool = False
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    """Judges the last number of the student's last answer."""

    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        """Return the tool, if there is to be one."""
        return [CalculatorTools(config.tools)] if config.calculator else []

    def is_right(self, reply: str) -> bool:
        """Return whether an answer ends with the result."""
        numbers = NUMBER.findall(reply)
        return bool(numbers) and int(numbers[-1]) == self.data.answer

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for a right answer, 0 for a wrong one."""
        return float(self.is_right(trace.last_reply))


class SumTasksetConfig(vf.TasksetConfig):
    """Says which sums there are. words: a prompt in words; else it is the sum alone."""

    num_tasks: int = 512
    largest: int = 999
    seed: int = 0
    words: bool = False
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    """Makes sums and differences that are not negative."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks, the same ones each time."""
        config, draw = self.config, random.Random(self.config.seed)
        for _ in range(config.num_tasks):
            one, other = draw.randint(0, config.largest), draw.randint(0, config.largest)
            sign = draw.choice("+-")
            one, other = (max(one, other), min(one, other)) if sign == "-" else (one, other)
            asked = f"How much is {one}{sign}{other}?" if config.words else f"{one}{sign}{other}=\n"
            answer = one + other if sign == "+" else one - other
            yield SumTask(SumData(prompt=asked, answer=answer), config.task)


class SumEnvConfig(vf.EnvConfig):
    """Says how the student plays. tries: its answers. again: what follows a wrong one."""

    agent: vf.AgentConfig = vf.AgentConfig()
    tries: int = 2
    again: str | None = None
    """None: the prompt once more."""


class SumEnv(vf.Env[SumEnvConfig]):
    """Lets the student try again."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """Play one sum."""
        again = self.config.again or task.data.prompt_text
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(self.config.tries - 1):
                if said.terminated or task.is_right(said.last_reply):
                    return
                said = await talk.turn(again)


__all__ = ["SumEnv", "SumTaskset"]

if __name__ == "__main__":
    CalculatorTools.run()  # as verifiers starts the process of a tool
