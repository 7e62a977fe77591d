"""A head's share: what data workers give is put together, and what they do not is told."""

from collections.abc import Mapping, Sequence

import pytest

from megatron_opd.data_workers.data_client import CannotFetch
from megatron_opd.learner import share_collector
from megatron_opd.learner.share_collector import SILENT_S, Collector
from megatron_opd.transport.messages import Train
from megatron_opd.transport.samples import FRAMES
from megatron_opd.wire.keys import RankKeys
from tests.support.wire import KEYS

WORKER = "tcp://worker:1"
PARTS = [("", "", 0), (WORKER, "k-1", 0), (WORKER, "k-2", 0)]
OWN = [memoryview(b"groups"), *(memoryview(b"own") for _ in range(FRAMES))]


class Workers:
    """Stands for DataClient: gives a sample for each key, or says why not."""

    error: CannotFetch | None = None
    limits: list[float]

    def __init__(self, max_bytes: int) -> None:
        assert max_bytes == 99
        self.open = True

    def fetch(
        self, wanted: Mapping[str, Sequence[str]], keys: RankKeys, silent_s: float
    ) -> dict[str, list[memoryview]]:
        assert (wanted, keys, self.open) == ({WORKER: ["k-1", "k-2"]}, KEYS.ranks, True)
        self.limits.append(silent_s)
        if self.error is not None:
            raise self.error
        return {key: [memoryview(key.encode())] * FRAMES for key in wanted[WORKER]}

    def close(self) -> None:
        self.open = False


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> type[Workers]:
    found = type("Workers", (Workers,), {"limits": []})
    monkeypatch.setattr(share_collector, "DataClient", found)
    return found


def request() -> Train:
    return Train(1, 7, 7, [], PARTS)


def test_the_frames_of_a_share_come_from_here_and_from_workers(workers: type[Workers]):
    collector = Collector(lambda: KEYS.ranks, 99, 1800.0)
    frames = collector.frames(request(), OWN)
    assert list(map(bytes, frames)) == [
        b"groups",
        *[b"own"] * FRAMES,
        *[b"k-1"] * FRAMES,
        *[b"k-2"] * FRAMES,
    ]
    assert workers.limits == [SILENT_S]
    collector.close()


def test_samples_that_are_not_to_be_had_are_no_frames_and_a_line(
    workers: type[Workers], capsys: pytest.CaptureFixture[str]
):
    workers.error = CannotFetch(f"{WORKER} gave nothing for 60 s")
    assert Collector(lambda: KEYS.ranks, 99, 1800.0).frames(request(), OWN) == []
    said = f"update 7 lacks samples: data worker {WORKER} gave nothing for 60 s\n"
    assert capsys.readouterr().err == said


def test_a_worker_is_given_up_before_the_other_ranks_give_up_this_one(workers: type[Workers]):
    Collector(lambda: KEYS.ranks, 99, 10.0).frames(request(), OWN)
    assert workers.limits == [5.0]
