"""Runs from start to end: start, evaluate, train, evaluate, export, summarise, stop.

Once the run's directory is its own, summary.json is always written and every process that was
started here is ended, whatever happens. `opd control` takes the directory only when everything
started elsewhere has joined, so a run that never began changes nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from megatron_opd.config.roles import STUDENT, answering
from megatron_opd.errors import Preempted, RunFailed
from megatron_opd.evaluation.best import export_best
from megatron_opd.evaluation.progress import EvaluationProgress
from megatron_opd.evaluation.summary import summary_of
from megatron_opd.fleet.commands import FleetCommands
from megatron_opd.fleet.guards import while_alive
from megatron_opd.run.attempt import Attempt
from megatron_opd.run.evaluations import port_of
from megatron_opd.run.recover import Training
from megatron_opd.run.stages import Ready, Up
from megatron_opd.run.start import bring_up


async def run(ready: Ready) -> None:
    """Perform a run; at its end summary.json is written and nothing is left running."""
    status, cause = "failed", None
    try:
        try:
            with ready.stopping.heeded():
                # watches end first, then the parts that they watch, the last one that came up first
                async with AsyncExitStack() as closers, AsyncExitStack() as watches:
                    closers.push_async_callback(ready.ends.closing(ready.remote.close))
                    await ready.ends.of(_stages(ready, closers, watches))
                    await ready.ends.closing(ready.remote.stop)()
        finally:
            await ready.ends.closing(ready.processes.stop)()
        status = "finished"
    except BaseException as last:
        status, cause, end = _verdict(ready, last)
        raise end from last
    finally:
        unwritten = None
        if ready.directory.taken:
            unwritten = ready.summary.write(ready.run_dir.summary, status, cause, ready.say)
    if unwritten is not None:
        raise RunFailed(unwritten)


async def _stages(ready: Ready, closers: AsyncExitStack, watches: AsyncExitStack) -> None:
    up = await bring_up(ready, closers, watches)
    before = await evaluate_before(ready, up)
    last = await train(ready, up, before, closers)
    await evaluate_after(ready, up, last)
    await export(ready, last)
    await up.sampling.farewell_received()


async def evaluate_before(ready: Ready, up: Up) -> EvaluationProgress:
    """Evaluate student and teachers, unless an earlier process of this run has."""
    if ready.resumed is None and not ready.config.sites.members:
        teachers = {
            name: port_of(ready.config, ready.prepared, role, up.fleets[role])
            for name, role in answering(ready.config).items()
            if role != STUDENT  # it is the student itself
        }
        ready.say(*await while_alive(up.guard, up.evaluations.before(teachers)))
    return up.evaluations.progress()


async def train(
    ready: Ready, up: Up, before: EvaluationProgress, closers: AsyncExitStack
) -> Attempt:
    """Make all updates; return the attempt that made the last one."""
    file = ready.config.cluster.fleet_file
    commands = FleetCommands(ready.run_dir.path, up.elastic, file, ready.say)
    up.supervisor.start(commands.serve())
    await up.sampling.open(up.guard, up.supervisor)
    attempts = await closers.enter_async_context(AsyncExitStack())
    return await Training(ready, up, before, attempts).all_updates()


async def evaluate_after(ready: Ready, up: Up, last: Attempt) -> None:
    """Evaluate the last weights while they stay live, and take leave of what samples."""
    if not ready.config.sites.members:
        version, learner = last.controller.accounting.version, asyncio.Lock()
        serve_on = up.sampling.weights.serve_on(lambda: version, learner)
        ready.say(*await while_alive(up.guard, last.evaluations.after(version), beside=serve_on))
        if ready.config.evaluation.after:
            figures = partial(summary_of, last.evaluations, version)
            ready.summary.follow("evaluations after", figures)
    await up.sampling.farewell(up.elastic.outliving)


async def export(ready: Ready, last: Attempt) -> None:
    """Write the student in Hugging Face format, its last weights and its best ones."""
    config, run_dir = ready.config, ready.run_dir
    if config.checkpoint.keep_best:
        await last.checkpoints.rotate()  # the best one is known only now
    if not config.checkpoint.export_hf:
        return
    template = ready.prepared.template.exported
    await ready.remote.export_hf(run_dir.final_checkpoint, chat_template=template)
    ready.say(f"checkpoint: {run_dir.final_checkpoint}")
    if config.checkpoint.keep_best:
        ready.say(await export_best(config, run_dir, last.evaluations))


def _verdict(ready: Ready, last: BaseException) -> tuple[str, str | None, BaseException]:
    """Return status, cause and what the program ends with. last: what left the run."""
    first = ready.stopping.meant(ready.ends.first or last)
    if isinstance(first, KeyboardInterrupt):
        return "interrupted", None, first
    if not isinstance(first, Exception):
        return ("preempted" if isinstance(first, Preempted) else "failed"), str(first), first
    where = f" (run.dir {ready.run_dir.path})" if isinstance(first, OSError) else ""
    directory = ready.directory
    text_and_end = ready.ends.failure(first, directory.see_logs(), directory.keep_traceback, where)
    return "failed", *text_and_end
