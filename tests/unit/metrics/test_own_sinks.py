"""A user's sink that raises costs its own rows and nothing else."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_opd.metrics.own_sinks import OwnSink, RunFacts, load_maker

FACTS = RunFacts(Path("run"), 3, {"run": {"seed": 7}})


class Kept:
    """Keeps what it gets; raises at the call whose number it is told."""

    def __init__(self, facts: RunFacts, fails_at: int = 99) -> None:
        self.facts, self.calls, self.fails_at = facts, [], fails_at
        Kept.last = self

    def _count(self, *call) -> None:
        if len(self.calls) == self.fails_at:
            raise KeyError("reward_mean")
        self.calls.append(call)

    def write(self, update, row):
        row["changed"] = True
        self._count("write", update)

    def evaluated(self, row):
        self._count("evaluated", row["set"])

    def close(self):
        self._count("close")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("kept_sinks")
    module.Kept = Kept
    module.breaks_at_1 = lambda facts: Kept(facts, 1)
    module.cannot_be_made = lambda facts: 1 / 0
    monkeypatch.setitem(sys.modules, "kept_sinks", module)


def use(sink: OwnSink) -> dict:
    row = {"loss": 1.0}
    sink.write(3, row)
    sink.evaluated({"set": "a"})
    sink.write(4, row)
    sink.close()
    sink.close()
    return row


@pytest.mark.usefixtures("made")
def test_every_row_is_passed_on_as_a_copy(caplog: pytest.LogCaptureFixture):
    row = use(OwnSink("kept_sinks:Kept", FACTS))
    assert Kept.last.facts is FACTS
    assert Kept.last.calls == [("write", 3), ("evaluated", "a"), ("write", 4), ("close",)]
    assert row == {"loss": 1.0}
    assert not caplog.records


@pytest.mark.usefixtures("made")
def test_one_that_raises_is_told_once_and_gets_no_more(caplog: pytest.LogCaptureFixture):
    use(OwnSink("kept_sinks:breaks_at_1", FACTS))
    assert Kept.last.calls == [("write", 3)]
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert told == (
        "metrics.sinks: kept_sinks:breaks_at_1 raised KeyError: 'reward_mean' and gets no more "
        "rows; they are in metrics.jsonl"
    )


@pytest.mark.usefixtures("made")
def test_one_that_cannot_be_made_is_told_once(caplog: pytest.LogCaptureFixture):
    use(OwnSink("kept_sinks:cannot_be_made", FACTS))
    (told,) = (entry.getMessage() for entry in caplog.records)
    assert "ZeroDivisionError" in told


@pytest.mark.usefixtures("made")
def test_only_what_can_be_called_makes_one():
    assert load_maker("kept_sinks:Kept") is Kept
    with pytest.raises(ValueError, match=r"metrics\.sinks: kept_sinks:__name__ must be a class"):
        load_maker("kept_sinks:__name__")
