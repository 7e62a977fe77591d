"""What the report says of a run: each finding once where it holds, and none where it does not."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.report.facts import Finding
from megatron_opd.report.findings import findings_of
from megatron_opd.report.run_data import RunData, load_runs
from tests.support.report_runs import simulated, written

NOW_S = 2e9


def load(path: Path) -> RunData:
    (run,) = load_runs([path])
    return run


def found(path: Path, now_s: float = NOW_S) -> tuple[Finding, ...]:
    return findings_of(load(path), now_s)


def one(tmp_path: Path, summary: Any = (), updates: int = 12, change=lambda update: {}) -> Finding:
    """The only finding of a run that differs from a good one in what is given."""
    run = written(tmp_path / "run", updates, {} if summary == () else summary, change)
    (finding,) = found(run)
    return finding


def test_a_good_run_has_no_finding(tmp_path: Path):
    assert found(written(tmp_path / "run", 40, {})) == ()


def test_few_updates_say_nothing_about_idle_time_and_trends(tmp_path: Path):
    change = lambda update: {  # noqa: E731
        "window_learner_idle_ratio": 0.9,
        "reverse_kl_nats": 0.1 * (update + 1),
        "ratio_p99": 9.0,
        "pause_s": 1.9,
        "response_tokens_mean": 10 * (update + 1),
    }
    assert found(written(tmp_path / "run", 7, {}, change)) == ()
    assert len(found(written(tmp_path / "more", 20, {}, change))) == 5


@pytest.mark.parametrize(
    ("summary", "level", "words"),
    [
        ({"status": "failed", "cause": "the learner died"}, "bad", "failed: the learner died"),
        ({"status": "failed", "cause": None}, "bad", "no cause is recorded"),
        ({"status": "interrupted"}, "warning", "was interrupted"),
        ({"status": "preempted", "cause": "SIGTERM"}, "warning", "was preempted: SIGTERM"),
        (None, "bad", "ended without a summary"),
    ],
)
def test_how_a_run_ended_is_said(tmp_path: Path, summary, level, words):
    finding = one(tmp_path, summary)
    assert finding.level == level
    assert words in finding.title
    assert "--resume" in finding.remedy


def test_a_running_run_that_writes_nothing_is_said(tmp_path: Path):
    run = written(tmp_path / "run")
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": "2100-01-01 00:00:00 +0000",
        "token": "ab" * 16,
    }
    (run / "run.lock").write_text(json.dumps(holder))
    os.utime(run / "metrics.jsonl", (NOW_S, NOW_S))
    assert found(run, NOW_S + 200) == ()
    (finding,) = found(run, NOW_S + 3600)
    assert "nothing was written for 60 minutes; an update takes 2.0 s" in finding.title


@pytest.mark.parametrize("first", [0, 5])
def test_a_loss_that_is_no_number_is_said(tmp_path: Path, first: int):
    change = lambda update: {"loss": None} if update >= first else {}  # noqa: E731
    finding = one(tmp_path, change=change)
    assert finding.level == "bad"
    assert f"no number from update {first} on" in finding.title


@pytest.mark.parametrize(("styled", "said"), [(12, True), (7, True), (6, False), (0, False)])
def test_hints_that_teach_style_are_said_where_most_measurements_do(
    tmp_path: Path, styled: int, said: bool
):
    def leaks(update: int) -> dict[str, float]:
        share = 0.05 if update < styled else 0.6
        figures = {"update": update, "right_nats": 0.3, "hint_share": share}
        return {f"leak_{name}": value for name, value in figures.items()} | {
            "leak_hint_share_error": 0.02
        }

    titles = [each.title for each in found(written(tmp_path / "run", 12, {}, leaks))]
    told = "the hint of another row teaches as much as the right one: 5%"
    assert any(told in title for title in titles) is said


def test_updates_that_teach_nothing_are_said(tmp_path: Path):
    finding = one(tmp_path, change=lambda update: {"without_signal": int(update % 4 == 0)})
    assert (finding.level, finding.title) == ("warning", "3 of 12 updates taught nothing")
    assert "rollout.group_size (now 1)" in finding.remedy
    worse = written(tmp_path / "worse", 12, {}, lambda update: {"without_signal": 1})
    assert found(worse)[0].level == "bad"


@pytest.mark.parametrize(
    ("learner", "fleet", "scoring", "title", "remedy"),
    [
        (0.67, 0.1, 1, "learner idle 67%: it waits for samples", "student.servers (now 1)"),
        (0.1, 0.5, 1, "rollout servers idle 50%", "schedule.max_staleness (now 1.0)"),
        (0.5, 0.4, 1, "wait for each other: idle 50% and 40%", "weight_sync.overlap"),
        (0.5, 0.1, 6, "the teacher limits the run: 75%", "scoring.concurrency (now 32)"),
    ],
)
def test_who_waits_for_whom(tmp_path: Path, learner, fleet, scoring, title, remedy):
    summary = {"learner_idle_ratio": learner, "fleet_idle_ratio": fleet}
    finding = one(tmp_path, summary, change=lambda update: {"scoring_samples": scoring})
    assert title in finding.title
    assert remedy in finding.remedy


TURNS = {"environment_s_mean": 9.0, "turn_sampling_s_mean": 3.0}


def test_an_environment_that_limits_the_run_is_said(tmp_path: Path):
    idle = {"learner_idle_ratio": 0.5, "fleet_idle_ratio": 0.6}
    finding = one(tmp_path, idle, change=lambda update: TURNS)
    assert "its answers take 9.0 s of a trajectory, the turns 3.0 s" in finding.title
    assert "the learner is idle 50%" in finding.title
    assert "schedule.max_staleness" in finding.remedy
    assert "buffer.batch_size" in finding.remedy


@pytest.mark.parametrize(
    ("learner", "columns", "title"),
    [
        (0.1, TURNS, "they wait for the learner"),
        (0.5, {**TURNS, "environment_s_mean": 2.0}, "wait for each other"),
        (0.5, {}, "wait for each other"),
    ],
)
def test_an_environment_that_does_not_limit_it_is_not_blamed(
    tmp_path: Path, learner: float, columns: dict[str, float], title: str
):
    idle = {"learner_idle_ratio": learner, "fleet_idle_ratio": 0.6}
    assert title in one(tmp_path, idle, change=lambda update: columns).title


def test_an_environment_that_limits_a_run_is_found_in_its_directory(tmp_path: Path):
    """A simulated run whose environment answers for ten times as long as a turn takes."""
    run = simulated(
        tmp_path / "run",
        updates=12,
        data={"train": "not here", "chat_template": True},
        rollout={"max_new_tokens": 40},
        environment={"type": "guess", "max_turns": 4},
        simulation={
            "costs": str(tmp_path / "costs.json"),
            "turns": {"mean": 3, "answer_s": 2.0},
        },
    )
    assert any("the environment limits the run" in each.title for each in found(run))


def test_idle_time_of_a_running_run_is_that_of_its_windows(tmp_path: Path):
    run = written(tmp_path / "run", change=lambda update: {"window_learner_idle_ratio": 0.8})
    assert any("learner idle 80%" in each.title for each in found(run))


def test_weight_syncs_that_pause_long_are_said(tmp_path: Path):
    finding = one(tmp_path, change=lambda update: {"pause_s": 1.0})
    assert "pause the servers 50% of the time" in finding.title


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (
            "reverse_kl_nats",
            lambda u: 0.1 if 10 <= u < 25 else 0.4,
            "reverse KL rises",
        ),
        ("response_tokens_mean", lambda u: 10 + u, "responses grow from 10 to 48 tokens"),
        ("entropy_nats", lambda u: 1.0 / (1 + u), "entropy fell from"),
    ],
)
def test_trends_are_said(tmp_path: Path, column, value, words):
    finding = one(tmp_path, updates=40, change=lambda update: {column: value(update)})
    assert words in finding.title


def test_noise_is_no_trend(tmp_path: Path):
    def change(update: int) -> dict[str, float]:
        noise = 1 + 0.2 * (-1) ** update
        kl = noise * max(0.03, 0.5 / (1 + update))
        return {"reverse_kl_nats": kl, "entropy_nats": 0.09 / (1 + update)}

    assert found(written(tmp_path / "run", 40, {}, change)) == ()


def test_a_small_part_of_what_was_won_may_be_lost_again(tmp_path: Path):
    change = lambda update: {"reverse_kl_nats": (0.5, 0.02, 0.06)[min(2, update // 12)]}  # noqa: E731
    assert found(written(tmp_path / "run", 40, {}, change)) == ()


def test_cut_responses_are_said(tmp_path: Path):
    finding = one(tmp_path, change=lambda update: {"length_stops": 1})
    assert "25% of the responses" in finding.title
    assert "rollout.max_new_tokens (now 1024)" in finding.remedy


def test_drops_are_said_with_their_reasons(tmp_path: Path):
    finding = one(tmp_path, {"samples_dropped": {"timeout": 3}})
    assert finding.title == "3 samples were dropped (timeout)"
    assert found(written(tmp_path / "few", 100, {"samples_dropped": {"timeout": 3}})) == ()


def test_servers_that_were_lost_are_named(tmp_path: Path):
    finding = one(tmp_path, {"servers_lost": {"http://b:1": "no answer"}})
    assert "1 servers were lost and did not come back: http://b:1" in finding.title


def test_a_slow_server_is_said(tmp_path: Path):
    servers = {
        name: {"version": 1, "rollouts": 1, "tokens": tokens}
        for name, tokens in (("a", 100), ("b", 90), ("c", 20))
    }
    finding = one(tmp_path, change=lambda update: {"servers": servers})
    assert "1 of 3 student servers sampled less than half" in finding.title
    servers["c"]["version"] = None  # it left
    assert found(written(tmp_path / "left", 12, {}, lambda update: {"servers": servers})) == ()


def test_columns_out_of_their_range_are_said_in_the_words_of_the_catalogue(tmp_path: Path):
    finding = one(tmp_path, change=lambda update: {"probs_diff_mean": 0.2})
    assert finding.title == "probs_diff_mean is 0.2; a good run has 0 to 0.02"
    assert "opd mismatch" in finding.remedy
    early = lambda update: {"probs_diff_mean": 0.2 if update < 6 else 0.0}  # noqa: E731
    assert found(written(tmp_path / "early", 12, {}, early)) == ()


def test_damaged_lines_are_counted(tmp_path: Path):
    run = written(tmp_path / "run", 12, {})
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("{\n[]\n")
    (finding,) = found(run)
    assert finding.title.startswith("2 lines of the run's files")


def test_the_worst_comes_first(tmp_path: Path):
    summary = {"status": "interrupted", "learner_idle_ratio": 0.9}
    run = written(tmp_path / "run", 12, summary, lambda update: {"without_signal": 1})
    assert [each.level for each in found(run)] == ["bad", "warning", "warning"]
