"""What went wrong in a run, line by line."""

import json
from pathlib import Path

from megatron_opd.report.failures import failures_of
from megatron_opd.report.run_data import load_runs
from tests.support.recorded_run import record
from tests.support.report_runs import written


def test_a_smooth_run_has_none(tmp_path: Path):
    (run,) = load_runs([written(tmp_path / "run", 12, {"servers_lost": {}, "learner_restarts": 0})])
    assert list(failures_of(run)) == []


def test_everything_is_listed(tmp_path: Path):
    summary = {
        "servers_lost": {"http://b:1": "no answer"},
        "servers_restarted": 2,
        "learner_restarts": 1,
        "samples_dropped": {"timeout": 3},
        "prompts_skipped": {"too long": 4},
        "servers_added": ["http://c:1"],
        "resumed_at_updates": [10, 20],
    }
    path = written(tmp_path / "run", 12, summary)
    change = {"at_updates": 10, "key": "rollout.concurrency", "before": 4, "after": 8}
    (path / "changes.json").write_text(json.dumps([change]))
    (run,) = load_runs([path])
    assert list(failures_of(run)) == [
        ("server lost", "http://b:1: no answer"),
        ("servers started again", "2"),
        ("restarts of the learner", "1"),
        ("samples dropped", "timeout: 3"),
        ("prompts skipped", "too long: 4"),
        ("server added", "http://c:1"),
        ("continued from a checkpoint", "after 10 updates"),
        ("continued from a checkpoint", "after 20 updates"),
        ("changed when it was continued", "rollout.concurrency from 4 to 8"),
    ]


def test_drops_of_a_run_without_a_summary_come_from_its_time_line(tmp_path: Path):
    record(tmp_path, drop={4, 5})
    (run,) = load_runs([tmp_path])
    assert list(failures_of(run)) == [("samples dropped", "nan: 2")]
