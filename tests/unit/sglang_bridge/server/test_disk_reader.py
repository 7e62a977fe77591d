"""A rank reads what it holds from whatever files hold it, in any state, and nothing else."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang_bridge import wire
from sglang_bridge.server.disk_reader import ACTIONS, DiskReader
from sglang_bridge.server.version_files import BadVersion
from sglang_bridge.weights import changes, manifest
from sglang_bridge.weights.manifest import MANIFEST, Opening, version_name
from tests.support.disk import (
    DIMS,
    RUN,
    SHAPES,
    Writers,
    differing,
    pieces_of,
    random_cuts,
    random_tensors,
    randomly_changed,
    reader_of,
)

KINDS = (torch.bfloat16, torch.float32)
HALVES = {
    "a": [(0, 6), (6, 6)],
    "b": [(0, 4), (4, 4)],
    "n": [(0, 7)],
}
NAMES = [version_name(i, 3 * i) for i in range(4)]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Checksums of 16 bytes and blocks of 8 numbers, so that small tensors have many of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "BLOCK", 8)
        patch.setattr(changes, "AT_ONCE", 2)
        patch.setattr(manifest, "CHUNK_BYTES", 16)
        yield


def cuts_of(rng: random.Random, most: int) -> dict[str, list[tuple[int, int]]]:
    return {name: random_cuts(rng, SHAPES[name][DIMS[name]], most) for name in ("a", "b")} | {
        "n": [(0, 7)]
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_rank_has_the_newest_bits_however_it_got_there(
    tmp_path_factory: pytest.TempPathFactory, seed: int
):
    """Random cuts of both sides, whole versions and changes in any order, ranks that miss some."""
    rng, root = random.Random(seed), tmp_path_factory.mktemp("versions")
    kind = rng.choice(KINDS)
    writers = Writers(root, cuts_of(rng, 3), kind)
    writers.stream.make("me")
    server = cuts_of(rng, 3)
    staged = rng.choice([(), None, ("a",), ("b", "n")])
    ranks = [pieces_of(rank, server, kind) for rank in range(3)]
    readers = [reader_of(held, root, staged=staged) for held in ranks]
    tensors, base = random_tensors(rng, kind), None
    for step in range(5):
        name = version_name(step, step)
        tensors = randomly_changed(rng, tensors, rng.choice([0.01, 0.3, 1.0]))
        base = base if step and rng.random() < 0.8 else None
        writers.write(name, tensors, base)
        base = name
        for held, reader in zip(ranks, readers, strict=True):
            if rng.random() < 0.3:
                continue  # it misses this one
            if rng.random() < 0.5:
                reader.stage(name)
            reader.take(name)
            assert differing(held, tensors) == []
    restarted = pieces_of(0, server, kind)
    reader_of(restarted, root, staged=staged).take(name)
    assert differing(restarted, tensors) == []


class Written:
    """Three versions of two writers: a whole one and two of changes; and a rank of one half."""

    def __init__(self, root: Path) -> None:
        self.root, rng = root, random.Random(5)
        self.writers = Writers(root, HALVES, torch.float32)
        self.writers.stream.make("me")
        self.versions = [random_tensors(rng, torch.float32)]
        self.versions += [self._changed(1), self._changed(2)]
        for i, tensors in enumerate(self.versions):
            self.writers.write(NAMES[i], tensors, NAMES[i - 1] if i else None)
        self.pieces = pieces_of(1, HALVES, torch.float32)
        self.reader = reader_of(self.pieces, root)

    def _changed(self, seed: int) -> dict[str, torch.Tensor]:
        return randomly_changed(random.Random(seed), self.versions[-1], 0.3)

    def path(self, version: int, file: str = "") -> Path:
        return self.root / RUN / NAMES[version] / file


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "weights")


def refusal(act: Callable[[], Any]) -> str:
    """The one line of a refusal."""
    with pytest.raises(BadVersion) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_files_are_safetensors(written: Written):
    found = load_file(written.path(0, "rank00001.safetensors"))
    assert sorted(found) == ["a", "b"]
    half = written.versions[0]["b"][:, 4:]
    assert torch.equal(found["b"].view(torch.int32), half.t().contiguous().view(torch.int32))


def test_less_is_read_than_is_there(written: Written):
    """Of the other rank's file nothing but "n", which is whole everywhere, and of changes few."""
    whole = int(written.reader.take(NAMES[0])[wire.RECEIVED_BYTES])
    heads = sum(
        int.from_bytes(file.read_bytes()[:8], "little") + 8
        for file in written.path(0).glob("*.safetensors")
    )
    assert whole == heads + sum(piece.view.nbytes for piece in written.pieces)
    assert differing(written.pieces, written.versions[0]) == []
    changed = int(written.reader.take(NAMES[1])[wire.RECEIVED_BYTES])
    assert 0 < changed < sum(file.stat().st_size for file in written.path(1).iterdir())
    assert written.reader.take(NAMES[1]) == {wire.RECEIVED_BYTES: "0"}


def test_a_chain_is_read_from_where_the_rank_is(written: Written):
    """A rank that holds the second version needs the third alone; a new one all of them."""
    written.reader.take(NAMES[1])
    shutil.rmtree(written.path(0))
    written.reader.take(NAMES[2])
    assert differing(written.pieces, written.versions[2]) == []
    late = reader_of(pieces_of(0, HALVES, torch.float32), written.root)
    text = refusal(lambda: late.take(NAMES[2]))
    assert str(written.path(0)) in text
    assert "is not there: let weight_sync.directory of the learner and of this server" in text


def test_staged_weights_are_not_live_until_they_are_taken(written: Written):
    reader = reader_of(written.pieces, written.root, staged=None)
    reader.take(NAMES[0])
    reader.stage(NAMES[2])
    while wire.PENDING in reader.staged(NAMES[2]):
        time.sleep(0.001)
    while (digests := reader.staged_digests()) is None:
        time.sleep(0.001)
    assert differing(written.pieces, written.versions[0]) == []
    before = {piece.key: piece.digest for piece in written.pieces}
    assert digests.keys() == before.keys()
    assert digests != before
    reader.take(NAMES[2])
    assert {piece.key: piece.digest for piece in written.pieces} == digests
    assert differing(written.pieces, written.versions[2]) == []
    assert reader.staged_digests() == {}


def test_a_damaged_version_that_was_staged_leaves_the_live_weights_alone(written: Written):
    reader = reader_of(written.pieces, written.root, staged=None)
    reader.take(NAMES[1])
    flip(written.path(2, "rank00001.safetensors"), -1)
    reader.stage(NAMES[2])
    assert "rank00001.safetensors" in refusal(lambda: until_staged(reader, NAMES[2]))
    refusal(lambda: reader.take(NAMES[2]))
    assert differing(written.pieces, written.versions[1]) == []
    name = version_name(3, 9)
    written.writers.write(name, written.versions[0])
    reader.stage(name)
    until_staged(reader, name)
    reader.take(name)
    assert differing(written.pieces, written.versions[0]) == []


def until_staged(reader: DiskReader, name: str) -> None:
    while wire.PENDING in reader.staged(name):
        time.sleep(0.001)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_found_by_the_file_s_name(written: Written):
    """In the head, in every array and in the manifest, of whole versions and of changes."""
    rng = random.Random(1)
    places = 0
    for version in (0, 2):
        for file in sorted(written.path(version).iterdir()):
            good = file.read_bytes()
            for at in range(rng.randrange(4), len(good), 4):
                flip(file, at, rng.randrange(8))
                found = told(written, version)
                assert found, f"byte {at} of {file}"
                assert all(str(file) in text and "anew" in text for text in found), found
                file.write_bytes(good)
                places += 1
    assert places > 500


def told(written: Written, version: int) -> list[str]:
    """What ranks of both halves say of a version; one that takes it has the right bits."""
    found: list[str] = []
    for rank in (0, 1):
        held = pieces_of(rank, HALVES, torch.float32)
        try:
            reader_of(held, written.root).take(NAMES[version])
            assert differing(held, written.versions[version]) == []
        except BadVersion as error:
            found.append(str(error))
    return found


def test_a_file_cut_short_anywhere_is_named(written: Written):
    for file in sorted(written.path(0).iterdir()):
        good = file.read_bytes()
        for size in (0, 1, 7, 8, 9, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:size])
            assert any(str(file) in text for text in told(written, 0)), size
            file.write_bytes(good)
    longer = written.path(0, "rank00001.safetensors")
    longer.write_bytes(longer.read_bytes() + b"\0")
    assert f"{longer} has " in refusal(lambda: written.reader.take(NAMES[0]))


def test_a_file_that_is_missing_or_of_another_version_is_named(written: Written):
    mine, other = (written.path(v, "rank00001.safetensors") for v in (0, 2))
    good = mine.read_bytes()
    mine.unlink()
    assert f"{mine} is not there" in refusal(lambda: written.reader.take(NAMES[0]))
    mine.write_bytes(other.read_bytes())
    assert str(mine) in refusal(lambda: written.reader.take(NAMES[0]))
    mine.write_bytes(good)
    shutil.copy(written.path(2, MANIFEST), written.path(0, MANIFEST))
    text = refusal(lambda: written.reader.take(NAMES[0]))
    assert f"it is that of '{NAMES[2]}', not of {NAMES[0]}" in text
    shutil.copytree(written.path(1), written.path(3))
    assert f"not of {NAMES[3]}" in refusal(lambda: written.reader.take(NAMES[3]))


def test_a_directory_that_nobody_may_enter_is_named(written: Written, monkeypatch: Any):
    """As the user that tests may run as enters everything, the system is made to refuse."""
    real = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(NAMES[0]):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    text = refusal(lambda: written.reader.take(NAMES[0]))
    assert text == f"{written.path(0)}: permission denied: let the server's user read it"


@pytest.mark.parametrize("what", ["run", "version", "file", "manifest"])
def test_no_symbolic_link_is_followed(written: Written, tmp_path: Path, what: str):
    link = {
        "run": written.root / RUN,
        "version": written.path(0),
        "file": written.path(0, "rank00001.safetensors"),
        "manifest": written.path(0, MANIFEST),
    }[what]
    elsewhere = tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    text = refusal(lambda: written.reader.take(NAMES[0]))
    assert text.startswith(f"{link} is a symbolic link or no directory, and neither is followed")


def test_the_root_may_be_a_link(written: Written, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(written.root)
    reader_of(written.pieces, link).take(NAMES[0])
    assert differing(written.pieces, written.versions[0]) == []


@pytest.mark.parametrize(
    "name",
    ["", "..", ".", "/etc", f"../{RUN}/{NAMES[0]}", f"{NAMES[0]}/..", f"{NAMES[0]}\0", "a" * 10**6],
)
def test_a_name_that_leads_elsewhere_is_refused(written: Written, name: str):
    assert "is no name of a version" in refusal(lambda: written.reader.take(name))
    assert "is no name of a version" in refusal(lambda: written.reader.stage(name))
    place = msgspec.json.encode(Opening(name, (), 0.0)).decode()
    assert "is no name of a run's weights" in refusal(lambda: written.reader.open(place))


def test_pipes_and_devices_are_not_opened(written: Written):
    file = written.path(0, "rank00001.safetensors")
    file.unlink()
    os.mkfifo(file)  # opening it would wait for a writer
    assert f"{file} is no plain file" in refusal(lambda: written.reader.take(NAMES[0]))


@pytest.mark.parametrize("wait_s", [-1.0, 1e9])
def test_no_wait_without_end(written: Written, wait_s: float):
    place = msgspec.json.encode(Opening(RUN, (), wait_s)).decode()
    assert "is no name of a run's" in refusal(lambda: written.reader.open(place))


def test_a_server_without_a_directory_reads_nothing(written: Written):
    place = msgspec.json.encode(Opening(RUN, (), 0.0)).decode()
    text = refusal(lambda: DiskReader(written.pieces, None).open(place))
    assert text.startswith("this server reads no weights from disk: start it with weight_sync.dire")


def test_nothing_is_done_before_it_is_opened_or_after_it_is_closed(written: Written):
    for reader in (DiskReader(written.pieces, str(written.root)), written.reader):
        reader.close()
        for name in (wire.STAGE_VERSION, wire.STAGED_VERSION, wire.TAKE_VERSION):
            text = refusal(lambda r=reader, n=name: ACTIONS[n](r, NAMES[0]))
            assert text == "this server was not told where versions of weights are"
    for junk in ("", "[", "{}", '{"stream": 1}', "[" * 10**5):
        with pytest.raises((BadVersion, RecursionError)):
            written.reader.open(junk)


def test_a_file_that_appears_late_is_waited_for(written: Written):
    hidden = written.path(0).rename(written.root / "hidden")
    reader = reader_of(written.pieces, written.root, staged=None, wait_s=20)
    reader.stage(NAMES[0])
    assert wire.PENDING in reader.staged(NAMES[0])
    hidden.rename(written.path(0))
    until_staged(reader, NAMES[0])
    reader.take(NAMES[0])
    assert differing(written.pieces, written.versions[0]) == []


def test_another_dtype_or_cut_is_named(written: Written):
    halves = pieces_of(0, HALVES, torch.bfloat16)
    text = refusal(lambda: reader_of(halves, written.root).take(NAMES[0]))
    assert text.startswith(f"version {NAMES[0]} holds float32, this rank bfloat16: serve with")
    odd = [*written.pieces]
    odd[0] = type(odd[0])("c", 0, 0, 6, odd[0].view)
    text = refusal(lambda: reader_of(odd, written.root).take(NAMES[0]))
    assert "does not hold [0:6] of dimension 0 of c exactly once" in text
    odd[0] = type(odd[0])("a", 1, 0, 6, torch.zeros(6, 6))
    assert "cuts dimension 0 of a [12, 6], of which this rank holds [6, 6] of" in refusal(
        lambda: reader_of(odd, written.root).take(NAMES[0])
    )
