"""What the learner's side lets sites read: ranges of files of versions that it offers, no more."""

import os
from pathlib import Path

import msgspec
import pytest

from megatron_opd.sites.messages import Want
from megatron_opd.sites.version_store import MAX_RANGE_BYTES, BadWant, VersionRemoved, VersionStore
from sglang_bridge.weights.manifest import MANIFEST
from tests.support.site_versions import Written

CONTENT = bytes(range(48))
FILE = "rank00000.safetensors"


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "learner")


def test_a_version_is_offered_with_the_digests_of_its_files(written: Written):
    store, offer = VersionStore(), written.write(3, CONTENT)
    found = store.add(written.stream.path, offer.name)
    in_order = sorted(found.files, key=lambda file: file.name)
    assert msgspec.structs.replace(found, files=in_order) == offer
    assert store.offers == (found,)
    assert store.read(Want(offer.name, FILE, 5, 9)) == CONTENT[5:9]
    store.close()


@pytest.mark.parametrize(
    "file",
    [
        "../owner",
        "owner",
        "/etc/passwd",
        f"../000000-version-1/{FILE}",
        f"./{FILE}",
        "",
        FILE + "\0",
        f"{FILE}/",
        "rank00009.safetensors",
    ],
)
def test_no_name_leads_to_anything_but_a_file_of_the_manifest(written: Written, file: str):
    store = VersionStore()
    offer = store.add(written.stream.path, written.write(1, CONTENT).name)
    (written.stream.path / offer.name / "owner").write_text("besides")
    with pytest.raises(BadWant, match="is no file of"):
        store.read(Want(offer.name, file, 0, 1))
    store.close()


@pytest.mark.parametrize(
    "name", ["..", "", "../run-0123456789ab/000000-version-1", "000001-version-1"]
)
def test_no_name_leads_to_what_is_not_offered(written: Written, name: str):
    store = VersionStore()
    store.add(written.stream.path, written.write(1, CONTENT).name)
    with pytest.raises(VersionRemoved):
        store.read(Want(name, MANIFEST, 0, 1))
    store.close()


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 4), (0, 49), (48, 48), (9, 8), (0, 0), (2**62, 2**62 + 1)]
)
def test_a_range_that_is_not_in_the_file_is_refused(written: Written, start: int, stop: int):
    store = VersionStore()
    offer = store.add(written.stream.path, written.write(1, CONTENT).name)
    with pytest.raises(BadWant, match="are not in"):
        store.read(Want(offer.name, FILE, start, stop))
    store.close()


def test_more_than_the_largest_range_is_refused(written: Written):
    store = VersionStore()
    offer = store.add(written.stream.path, written.write(1, bytes(MAX_RANGE_BYTES + 1)).name)
    assert len(store.read(Want(offer.name, FILE, 1, MAX_RANGE_BYTES + 1))) == MAX_RANGE_BYTES
    with pytest.raises(BadWant, match="are more than"):
        store.read(Want(offer.name, FILE, 0, MAX_RANGE_BYTES + 1))
    store.close()


def test_what_a_site_may_need_stays_readable_after_the_learner_deleted_it(written: Written):
    store = VersionStore()
    whole = written.write(1, CONTENT)
    change = written.write(2, CONTENT[:12], whole)
    others = [written.write(number, CONTENT) for number in (3, 4)]
    for offer in (whole, change, *others):
        store.add(written.stream.path, offer.name)
    written.stream.keep(())
    opened = len(os.listdir("/proc/self/fd"))
    store.keep([change.name])
    assert len(os.listdir("/proc/self/fd")) == opened - 3, "a version's files are closed"
    assert [offer.name for offer in store.offers] == [whole.name, change.name, others[1].name]
    assert store.read(Want(whole.name, FILE, 0, 48)) == CONTENT
    with pytest.raises(VersionRemoved):
        store.read(Want(others[0].name, FILE, 0, 1))
    store.close()
    assert len(os.listdir("/proc/self/fd")) == opened - 12


def test_links_and_files_of_another_size_are_not_offered(written: Written, tmp_path: Path):
    store, offer = VersionStore(), written.write(1, CONTENT)
    opened = len(os.listdir("/proc/self/fd"))
    path = written.stream.path / offer.name / FILE
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="has 47 bytes, not as written"):
        store.add(written.stream.path, offer.name)
    path.unlink()
    (tmp_path / "secret").write_bytes(CONTENT)
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"):
        store.add(written.stream.path, offer.name)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert store.offers == ()
