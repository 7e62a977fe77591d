"""Defines how verifiers are run: in worker processes, each judgement within limits."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_opd.config.section import ByteCount, PositiveInt, Processes, Seconds, Section


class CodeConfig(Section):
    """Limits programs that data.task: code runs. A program that exceeds a limit is wrong."""

    enabled: bool = False
    """Allows data.task: code to run what a model has written, shut off from network and files in
    namespaces of its own. Where the kernel denies that, the run does not start. Costs each response
    about 0.1 s per test of inputs and outputs, besides its own time."""
    timeout_s: Seconds = 8.0
    """Longest time in seconds that all tests of one response may take together. Raising it lets
    slow programs pass, and each endless one costs as much more."""
    cpu_s: PositiveInt = 5
    """Longest time in seconds that one process of a program may compute. Raising it lets programs
    pass that compute longer."""
    memory_bytes: ByteCount = 512 * 2**20
    """Largest address space in bytes of one process of a program. Raising it lets programs pass
    that need more memory; the machine needs it for each of verifier.workers."""
    file_bytes: ByteCount = 16 * 2**20
    """Largest size in bytes of all files of a program together, which are held in memory and
    removed with it. Raising it takes as much more memory for each of verifier.workers."""
    processes: Processes = 1
    """Largest number of processes and threads of a program at once. Raising it lets programs pass
    that start threads, and multiplies what memory_bytes and cpu_s limit."""
    reward: Literal["all", "share"] = "all"
    """all: a response gets 1 if it passes every test of its row, otherwise 0; share: the share of
    the tests that it passes, which teaches from partly right programs too and counts as correct in
    an evaluation only at 1."""


class VerifierConfig(Section):
    """Says how the verifiers that data.task or data.task_key names are run.

    Those of arithmetic, exact and multiple_choice take time in proportion to the text and are
    asked in the controller itself; all others in worker processes on its machine.
    """

    workers: Processes = 4
    """Number of worker processes, each of which judges one response at a time. Raising it judges
    more at once, and takes a CPU core and some 100 MB of memory for each."""
    timeout_s: Seconds = 10.0
    """Longest time in seconds of one judgement; then the worker is replaced and the sample dropped
    and counted (verifier_timed_out), or counted as wrong in an evaluation. Raising it waits longer
    for a verifier that hangs."""
    memory_bytes: ByteCount = 4 * 2**30
    """Largest address space in bytes of one worker; beyond it the sample is dropped and counted
    (verifier_out_of_memory). Raising it lets a verifier take more of the machine's memory."""
    code: CodeConfig = CodeConfig()
    """Programs that a model has written."""

    @model_validator(mode="after")
    def _programs_end_before_their_verifier(self) -> VerifierConfig:
        if not self.code.enabled:
            return self
        if self.code.timeout_s >= self.timeout_s:
            raise ValueError(
                "code.timeout_s must be below timeout_s, or an endless program drops its sample "
                f"instead of being wrong, got {self.code.timeout_s:g} and {self.timeout_s:g}"
            )
        if self.code.memory_bytes > self.memory_bytes:
            raise ValueError(
                "code.memory_bytes must be at most memory_bytes, which limits what a worker "
                f"starts too, got {self.code.memory_bytes} and {self.memory_bytes}"
            )
        return self
