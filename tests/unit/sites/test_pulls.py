"""A site pulls versions by ranges of bytes; whatever breaks in between, it ends with the same."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from megatron_opd.sites import pulls as pulls_module
from megatron_opd.sites.messages import FilePiece, Offer, Want, decode_to_learner
from megatron_opd.sites.mirror import BadOffer, Mirror
from megatron_opd.sites.pulls import TRIES, WINDOW, Pulls
from tests.support.delays import Delays
from tests.support.site_versions import Written, files_of, is_served

CONTENT = bytes(range(48))


@pytest.fixture(autouse=True)
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of a few bytes: a small file takes several."""
    monkeypatch.setattr(pulls_module, "RANGE_BYTES", 7)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "learner")


class Learner:
    """The other end of the pulls: answers each Want, in order, unless told otherwise.

    stop_after: bytes, after which nothing is answered, not even the rest of a range.
    """

    def __init__(self, written: Written, stop_after: int | None = None) -> None:
        self.written, self.left = written, stop_after
        self.wants: list[Want] = []
        self.removed: set[str] = set()
        self.most = 0
        self.edit: Callable[[Want, bytes], bytes] = lambda want, data: data
        self.pulls: Pulls | None = None
        self.said: list[str] = []
        self._open = 0

    async def send(self, parts: Sequence[bytes]) -> None:
        want = decode_to_learner(parts[0])
        assert isinstance(want, Want)
        await self.ask(want)

    async def ask(self, want: Want) -> None:
        self.wants.append(want)
        self._open += 1
        self.most = max(self.most, self._open)
        asyncio.get_running_loop().call_soon(self._answer, want)

    def _answer(self, want: Want) -> None:
        assert self.pulls is not None
        self._open -= 1
        if want.name in self.removed:
            self.pulls.missing(want.name)
            return
        data = self.written.read(want.name, want.file)[want.start : want.stop]
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                return
        piece = FilePiece(want.name, want.file, want.start)
        self.pulls.arrived(piece, self.edit(want, data))

    def begin(self, mirror: Mirror, delays: Delays | None = None) -> Pulls:
        self.pulls = Pulls(mirror, self, delays or Delays(), self.said.append)
        return self.pulls


def mirror_of(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "site", "a", "one")


async def during(pulls: Pulls, work: Awaitable[object]) -> None:
    """Pull while `work` goes on; the pulls must not fail meanwhile."""
    running = asyncio.create_task(pulls.run())
    waited = asyncio.ensure_future(work)
    await asyncio.wait({running, waited}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await waited


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_a_version_arrives_as_it_was_written_by_a_few_ranges_at_once(
    tmp_path: Path, written: Written
):
    offer, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        await during(pulls, pulls.first())
        assert pulls.num_bytes == sum(file.num_bytes for file in offer.files)
        assert not pulls.refused

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)
    assert learner.most == WINDOW


TOTAL = 289
"""Bytes of a version of CONTENT."""


@pytest.mark.parametrize("position", range(TOTAL))
def test_a_site_killed_at_any_byte_goes_on_behind_what_it_has(
    tmp_path: Path, written: Written, position: int
):
    offer = written.write(1, CONTENT)
    assert sum(file.num_bytes for file in offer.files) == TOTAL
    partial = mirror_of(tmp_path).path / f"{offer.name}.partial"
    partial.mkdir()
    left = position  # as if it had been killed in the middle of a write
    for file in offer.files:
        if left > 0:
            (partial / file.name).write_bytes(written.read(offer.name, file.name)[:left])
        left -= file.num_bytes
    mirror, learner = mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        assert not is_served(mirror.path, offer.name)
        await during(pulls, pulls.first())
        assert pulls.num_bytes == TOTAL - position

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)


@pytest.mark.parametrize("position", range(0, TOTAL, 13))
def test_pieces_that_end_anywhere_leave_nothing_that_could_be_served(
    tmp_path: Path, written: Written, position: int
):
    """The learner's process is gone in the middle, and another one offers the same again."""
    offer = written.write(1, CONTENT)
    gone, back = Learner(written, stop_after=position), Learner(written)

    async def run() -> None:
        mirror = mirror_of(tmp_path)
        pulls = gone.begin(mirror)
        pulls.offered(offer)
        await during(pulls, until(lambda: gone.left is not None and gone.left < 0))
        assert not is_served(mirror.path, offer.name)
        kept = sum(map(len, files_of(mirror.path / f"{offer.name}.partial").values()))
        assert kept <= position
        pulls = back.begin(mirror)
        pulls.offered(offer)
        await during(pulls, pulls.first())
        assert pulls.num_bytes == TOTAL - kept
        assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)

    asyncio.run(run())


def test_pieces_in_any_order_make_the_same_file(tmp_path: Path, written: Written):
    offer, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)
    waiting: list[tuple[FilePiece, bytes]] = []

    async def keep(want: Want) -> None:
        data = written.read(want.name, want.file)[want.start : want.stop]
        waiting.append((FilePiece(want.name, want.file, want.start), data))

    async def answer() -> None:
        assert learner.pulls is not None
        while mirror.newest is None:
            await asyncio.sleep(0)
            while waiting:
                learner.pulls.arrived(*waiting.pop())

    async def run() -> None:
        learner.ask = keep
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        await during(pulls, asyncio.gather(pulls.first(), answer()))

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)


def test_a_wrong_digest_is_refused_counted_and_pulled_again(tmp_path: Path, written: Written):
    offer, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)
    spoilt: list[Want] = []

    def flip(want: Want, data: bytes) -> bytes:
        if want.file == "rank00001.safetensors" and want.start == 7 and len(spoilt) < 2:
            spoilt.append(want)
            assert not is_served(mirror.path, offer.name)
            return data[:3] + bytes([data[3] ^ 4]) + data[4:]
        return data

    async def run() -> None:
        learner.edit = flip
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        await during(pulls, pulls.first())
        assert pulls.refused == {"wrong_digest": 2}

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)
    again = [want.file for want in learner.wants].count("rank00000.safetensors")
    assert again == -(-len(CONTENT) // 7), "the whole file is pulled once"


@pytest.mark.parametrize("remove", [True, False])
def test_a_file_that_is_changed_here_while_it_arrives_is_pulled_again(
    tmp_path: Path, written: Written, remove: bool
):
    offer, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)
    changed: list[Path] = []

    def change(want: Want, data: bytes) -> bytes:
        path = next(mirror.path.glob("*.partial/rank*1.safetensors"), None)
        if path is not None and path.stat().st_size > 7 and not changed:
            changed.append(path)
            path.unlink() if remove else path.write_bytes(b"")
        return data

    async def run() -> None:
        learner.edit = change
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        await during(pulls, pulls.first())
        assert pulls.refused["changed_here"] == 1

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)
    assert learner.said == [f"{changed[0]} was changed while it arrived; it is pulled again"]


def test_a_version_that_always_arrives_damaged_is_given_up_for_the_next(
    tmp_path: Path, written: Written
):
    bad, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)
    good = written.write(2, CONTENT)

    def flip(want: Want, data: bytes) -> bytes:
        return bytes(len(data)) if want.name == bad.name and want.start == 0 else data

    async def run() -> None:
        learner.edit = flip
        pulls = learner.begin(mirror)
        pulls.offered(bad)
        await during(pulls, until(lambda: pulls.refused["version"] == 1))
        assert pulls.refused["wrong_digest"] == TRIES
        assert not is_served(mirror.path, bad.name)
        pulls.offered(good)
        await during(pulls, until(lambda: mirror.newest == good.name))

    asyncio.run(run())
    assert learner.said[-1] == "version 000000-version-1 is given up: it arrived damaged 5 times"


def test_bytes_that_were_not_asked_for_change_nothing(tmp_path: Path, written: Written):
    offer, mirror, learner = written.write(1, CONTENT), mirror_of(tmp_path), Learner(written)

    def meddle(want: Want, data: bytes) -> bytes:
        assert learner.pulls is not None
        for piece, more in (
            (FilePiece("../../etc", want.file, want.start), bytes(len(data))),
            (FilePiece(want.name, "../owner", want.start), bytes(len(data))),
            (FilePiece(want.name, want.file, want.start + 1), bytes(len(data))),
            (FilePiece(want.name, want.file, want.start), data + b"x"),
            (FilePiece(want.name, want.file, -1), b""),
        ):
            learner.pulls.arrived(piece, more)
        return data

    async def run() -> None:
        learner.edit = meddle
        pulls = learner.begin(mirror)
        pulls.offered(offer)
        await during(pulls, pulls.first())
        assert pulls.refused == {"piece_not_asked_for": 5 * len(learner.wants)}

    asyncio.run(run())
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)
    assert sorted(entry.name for entry in (tmp_path / "site").iterdir()) == [mirror.stream]


def test_a_site_that_missed_versions_pulls_the_changes_in_order(tmp_path: Path, written: Written):
    whole = written.write(1, CONTENT)
    second = written.write(2, CONTENT[:12], whole)
    third = written.write(3, CONTENT[:20], second)
    mirror, learner = mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror)
        for offer in (third, second, whole):  # newest first, as a learner offers them
            pulls.offered(offer)
        await during(pulls, pulls.first())
        assert mirror.newest == third.name

    asyncio.run(run())
    assert mirror.chain(third.name) == (third.name, second.name, whole.name)
    names = [want.name for want in learner.wants]
    assert list(dict.fromkeys(names)) == [whole.name, second.name, third.name]


def test_a_newer_whole_version_makes_the_chain_before_it_needless(tmp_path: Path, written: Written):
    whole = written.write(1, CONTENT)
    change = written.write(2, CONTENT[:12], whole)
    anew = written.write(3, CONTENT)
    mirror, learner = mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror)
        for offer in (anew, change, whole):
            pulls.offered(offer)
        await during(pulls, pulls.first())

    asyncio.run(run())
    assert {want.name for want in learner.wants} == {anew.name}


def test_what_servers_hold_stays_and_older_versions_go(tmp_path: Path, written: Written):
    offers = [written.write(number, CONTENT) for number in range(1, 5)]
    mirror, learner = mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror)
        for offer in offers:
            pulls.offered(offer)
            await during(pulls, until(lambda name=offer.name: mirror.newest == name))
            if offer is offers[1]:
                pulls.in_use = {offer.name}

    asyncio.run(run())
    there = sorted(entry.name for entry in mirror.path.iterdir())
    assert there == [offers[1].name, offers[3].name, "owner"]


def test_a_version_removed_in_the_middle_leaves_nothing_and_the_newer_one_is_pulled(
    tmp_path: Path, written: Written
):
    old, learner, mirror = written.write(1, CONTENT), Learner(written), mirror_of(tmp_path)
    new = written.write(2, CONTENT)

    def remove(want: Want, data: bytes) -> bytes:
        if want.name == old.name and len(learner.wants) > 6 and not learner.removed:
            assert learner.pulls is not None
            learner.removed.add(old.name)
            learner.pulls.offered(new)
        return data

    async def run() -> None:
        learner.edit = remove
        pulls = learner.begin(mirror)
        pulls.offered(old)
        await during(pulls, until(lambda: mirror.newest == new.name))
        assert not pulls.refused

    asyncio.run(run())
    assert sorted(entry.name for entry in mirror.path.iterdir()) == [new.name, "owner"]


def test_what_began_to_arrive_is_brought_to_its_end_though_newer_ones_come(
    tmp_path: Path, written: Written
):
    first, learner, mirror = written.write(1, CONTENT), Learner(written), mirror_of(tmp_path)
    later = [written.write(number, CONTENT) for number in (2, 3)]

    def offer_more(want: Want, data: bytes) -> bytes:
        assert learner.pulls is not None
        if want.name == first.name and later:
            learner.pulls.offered(later[0])
            learner.pulls.offered(later[1])
        return data

    async def run() -> None:
        learner.edit = offer_more
        pulls = learner.begin(mirror)
        pulls.offered(first)
        await during(pulls, until(lambda: mirror.newest == later[1].name))

    asyncio.run(run())
    names = list(dict.fromkeys(want.name for want in learner.wants))
    assert names == [first.name, later[1].name], "the one in between is skipped"


def test_when_a_delay_is_over_the_newest_version_is_pulled_and_the_next_begins(
    tmp_path: Path, written: Written
):
    whole = written.write(1, CONTENT)
    change = written.write(2, CONTENT[:12], whole)
    mirror, learner = mirror_of(tmp_path), Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror, Delays({0: 0.02, 1: 9e9}))
        pulls.offered(whole)
        pulls.offered(change)
        assert (pulls.goal, pulls.has_offers) == (None, True)
        await during(pulls, pulls.first())
        assert mirror.newest == change.name
        pulls.offered(written.write(3, CONTENT))
        assert pulls.goal == change.name, "the next delay has begun"

    asyncio.run(run())


def test_an_offer_that_is_none_changes_nothing(tmp_path: Path, written: Written):
    offer: Offer = written.write(1, CONTENT)

    async def run() -> None:
        pulls = Learner(written).begin(mirror_of(tmp_path))
        with pytest.raises(BadOffer):
            pulls.offered(msgspec.structs.replace(offer, name="../x"))
        assert not pulls.has_offers

    asyncio.run(run())


def test_a_site_that_came_back_pulls_nothing_older_than_what_it_has(
    tmp_path: Path, written: Written
):
    old, newer = written.write(1, CONTENT), written.write(2, CONTENT)
    learner = Learner(written)

    async def run() -> None:
        pulls = learner.begin(mirror_of(tmp_path))
        pulls.offered(newer)
        await during(pulls, pulls.first())
        learner.wants.clear()
        pulls = learner.begin(mirror_of(tmp_path))  # another process of the site
        pulls.offered(old)
        await during(pulls, asyncio.gather(pulls.first(), asyncio.sleep(0.05)))
        assert learner.wants == []

    asyncio.run(run())
