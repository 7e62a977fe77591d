"""Every border under a few hundred seeded hostile inputs: no crash, no silent acceptance.

`python -m checks fuzz` runs many more of the same.
"""

from dataclasses import asdict
from pathlib import Path

import pytest

from checks.fuzz import campaign
from checks.fuzz.campaign import read_progress, run_campaign
from checks.fuzz.engine import Tally, Target, merged, message_problem, run_chunk
from checks.fuzz.targets import load_target, target_names
from harness.tree import ROOT

COUNT = 40


@pytest.mark.keeps_contexts  # a target makes its sockets once in a process
@pytest.mark.parametrize("name", target_names())
def test_hostile_inputs_are_refused_in_one_line_or_used_as_they_are(name: str):
    target = load_target(name)
    tally = run_chunk(target, seed=11, chunk=0, count=round(COUNT * target.share) or 1)
    assert tally.findings == {}
    assert tally.refused + tally.accepted > 0
    assert tally.accepted > 0, "inputs that are all refused test one line of the border"


def outcome(call, oracle=lambda given, result: None) -> Tally:
    target = Target("toy", lambda rng: "x", call, (ValueError,), oracle)
    return run_chunk(target, 1, 0, 5)


def test_the_engine_tells_a_refusal_from_a_crash_and_an_acceptance_from_a_silent_one():
    def refuse(given):
        raise ValueError("key must be 5")

    def babble(given):
        raise ValueError("two\nlines")

    def fail(given):
        raise KeyError(given)

    class PanicException(BaseException):
        pass

    def panic(given):
        raise PanicException

    assert asdict(outcome(refuse)) == asdict(Tally(refused=5))
    assert asdict(outcome(str)) == asdict(Tally(accepted=5))
    silent = outcome(str, lambda given, result: "must be refused")
    assert (silent.silent, list(silent.findings)) == (5, ["silent: must be refused"])
    for call, words in ((babble, "control characters"), (fail, "KeyError"), (panic, "PanicEx")):
        tally = outcome(call)
        assert tally.crashes == 5
        (signature,) = tally.findings
        assert words in signature
        assert tally.findings[signature]["example"] == "'x'"


def test_a_hang_is_a_crash(monkeypatch: pytest.MonkeyPatch):
    from checks.fuzz import engine

    monkeypatch.setattr(engine, "HANG_S", 0.05)

    def spin(given):
        while True:
            pass

    assert "Hang" in next(iter(outcome(spin).findings))


@pytest.mark.parametrize("message", ["", " ", "a\nb", "\x1b[2J", "x" * 2001])
def test_what_is_no_line_for_a_terminal(message: str):
    assert message_problem(message) is not None
    assert message_problem("data.train: é must be 'x'") is None


def test_a_campaign_goes_on_where_it_stopped_and_ends_the_same(tmp_path: Path):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    first = run_campaign(["safetensors_index"], 20, 3, whole, size=10)
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    part.write_text(lines[0] + lines[1][:20])  # cut short when it was killed
    assert len(read_progress(part)) == 1
    again = run_campaign(["safetensors_index"], 20, 3, part, size=10)
    figures = ("inputs", "refused", "accepted", "silent", "crashes", "targets")
    assert [again[key] for key in figures] == [first[key] for key in figures]
    assert first["crashes"] == first["silent"] == 0


def test_the_death_of_a_process_names_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The campaign goes on behind it."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(campaign, "WORKER", "deadly")
    found = run_campaign(["overrides"], 20, 3, size=10)
    assert found["crashes"] == 1
    (crash,) = found["targets"][0]["findings"].values()
    assert crash["example"] == "'chunk 0, input 4'"


DEADLY = """
import os, sys
if sys.argv[-1] == "1" and len(sys.argv) == 5:
    print('{"key": ["overrides", 3, 1], "tally": {"refused": 10}}')
else:
    print(*range(5), sep="\\n", flush=True)
    os.kill(os.getpid(), 11)
"""


def test_findings_are_merged_by_what_they_are():
    one, other = Tally(crashes=1), Tally(crashes=2)
    one.find("crash", "KeyError (a.py:1)", "x")
    other.find("crash", "KeyError (a.py:1)", "y")
    other.find("crash", "IndexError (a.py:2)", "z")
    whole = merged([one, other])
    assert whole.crashes == 3
    counts = {signature: found["count"] for signature, found in whole.findings.items()}
    assert counts == {"crash: KeyError (a.py:1)": 2, "crash: IndexError (a.py:2)": 1}
