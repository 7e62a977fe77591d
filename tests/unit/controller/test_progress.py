"""What a run shows while it runs."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_opd.controller.progress import (
    LivePanel,
    PlainLines,
    duration,
    line,
    make_display,
    panel,
)
from megatron_opd.metrics.live_display import snapshot
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.totals import RunTotals
from megatron_opd.metrics.types import Depths
from tests.support.recorded_run import record


def test_plain_lines_when_there_is_no_terminal(tmp_path):
    text = io.StringIO()
    display = make_display(Console(file=text, width=40))
    assert isinstance(display, PlainLines)
    record(tmp_path, display=display)
    lines = text.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[2].startswith("update 3/7  version 3  loss 0.5000  reverse KL 0.2500")
    assert "permits" in lines[2]
    assert lines[-1].endswith("ETA 0:00")


def test_a_run_without_a_teacher_shows_its_reward(tmp_path):
    shown = snapshot(RunRecorder(RunTotals()), 4)
    rewarded = replace(shown, reward_mean=0.25)
    assert "reverse KL -" in line(shown)
    assert "  reward 0.2500  " in line(rewarded)
    assert "  reverse KL 0.5000  " in line(replace(rewarded, reverse_kl_nats=0.5))
    text = io.StringIO()
    Console(file=text, width=120).print(panel(rewarded))
    assert "reward" in text.getvalue()
    assert "nats" not in text.getvalue()


def test_live_panel_on_a_terminal(tmp_path):
    text = io.StringIO()
    display = make_display(Console(file=text, force_terminal=True, width=120))
    assert isinstance(display, LivePanel)
    record(tmp_path, display=display)
    shown = text.getvalue()
    assert "update 7/7" in shown
    assert "reverse KL (nats)" in shown
    assert "permits" in shown


def test_a_line_before_the_first_update():
    recorder = RunRecorder(RunTotals())
    recorder.started(0.0, Depths(1, 2, 3, 6, 8))
    text = line(snapshot(recorder, 4))
    assert "loss -" in text
    assert "permits 6/8" in text
    assert text.endswith("ETA -")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
