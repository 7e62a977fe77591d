"""Gives the student a Python interpreter in the sandbox: one tool, `python`.

Every call is a process of its own: nothing is left of the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megatron_opd.data.verifiers.sandbox.run import SandboxLimits, SandboxOutcome, run_program
from megatron_opd.environments.tools import CallableTool, ToolEnvironment

# The sandbox discards what goes to the standard error; a student reads tracebacks.
_PROGRAM = """
import sys
sys.stderr = sys.stdout
exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
"""
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "a program; print what to see"}},
    "required": ["code"],
    "additionalProperties": False,
}


class PythonEnvironment(ToolEnvironment):
    """Gives one tool, which runs a program and returns what it prints.

    timeout_s: of one program. output_characters: of what is returned of its output, the end. The
    other options are those of SandboxLimits.
    """

    def __init__(
        self, *, timeout_s: float = 8.0, output_characters: int = 4096, **limits: int
    ) -> None:
        self._timeout_s, self._most = timeout_s, output_characters
        self._limits = SandboxLimits(**limits)
        what = "Runs a Python program and returns what it prints."
        super().__init__([CallableTool("python", what, _PARAMETERS, self._run)])

    async def _run(self, arguments: Mapping[str, Any]) -> str:
        program = _PROGRAM.format(code=arguments["code"])
        outcome = await asyncio.to_thread(run_program, program, "", self._limits, self._timeout_s)
        return self._told(outcome)

    def _told(self, outcome: SandboxOutcome) -> str:
        text = outcome.output.decode(errors="replace").rstrip()
        if len(text) > self._most:
            text = f"[{len(text) - self._most} characters left out]\n{text[-self._most :]}"
        if outcome.ended == "time":
            text += f"\n[ended after {self._timeout_s:g} s]"
        elif outcome.ended == "output":
            text += "\n[ended: it printed too much]"
        elif outcome.code:
            text += f"\n[exit code {outcome.code}]"
        return text.lstrip("\n") or "[no output]"
