"""A whole fake run, recorded by every sink."""

import asyncio

from megatron_opd.buffer.rejection import ScoreRejected
from megatron_opd.controller.controller import Controller
from megatron_opd.controller.ports import Ports
from megatron_opd.metrics.live_display import LiveDisplay
from megatron_opd.metrics.observers import Observers
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.sinks import JsonlSink
from megatron_opd.metrics.tensorboard import TensorBoardSink
from megatron_opd.metrics.timeline import Timeline
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.sim.clock import run_virtual
from tests.support.fakes import Fleet, Learner, Teacher, WeightSyncer, prompts
from tests.support.schedules import planned


def record(tmp_path, *, updates=7, display=None, drop=(), learner=None, rollouts=None):
    """A whole fake run through the recorder and every sink."""
    totals = RunTotals(["student-0"])
    trace = TraceWriter(tmp_path / "trace.json", 0.0)
    fleet = Fleet(lambda uid: 1.0 + uid % 3)
    learner = learner or Learner()
    scores = Teacher(fail=lambda uid: ScoreRejected("nan", "teacher-0") if uid in drop else None)

    async def scenario():
        sinks = [JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")]
        clock = asyncio.get_running_loop().time
        recorder = RunRecorder(totals, sinks, clock)
        timeline = Timeline(trace, ["student-0"], clock)
        shown = None if display is None else LiveDisplay(display, recorder, updates)
        found = [each for each in (timeline, rollouts, recorder, shown) if each is not None]
        observers = Observers(found)
        ports = Ports(prompts(), fleet, scores, learner, WeightSyncer(fleet, learner), observers)
        await Controller(planned(updates, 3, 2, 16, 16), ports).run()
        observers.close()
        return recorder

    return run_virtual(scenario()), learner
