"""What a site keeps of versions: whole ones under their name, parts that outlive the process."""

from pathlib import Path

import msgspec
import pytest

from megatron_opd.sites.messages import FileSize, Offer
from megatron_opd.sites.mirror import BadBytes, BadOffer, Mirror, check_offer
from sglang_bridge.weights.manifest import MANIFEST
from tests.support.site_versions import Written, files_of, is_served

CONTENT = bytes(range(40))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "learner")


def mirror_of(tmp_path: Path, run: str = "one", owner: str = "a") -> Mirror:
    return Mirror(tmp_path / "site", owner, run)


def fill(mirror: Mirror, written: Written, offer: Offer) -> None:
    for file in offer.files:
        at = mirror.there(offer, file)
        mirror.append(offer, file, at, written.read(offer.name, file.name)[at:])


def test_a_version_gets_its_name_once_all_digests_are_right(tmp_path: Path, written: Written):
    mirror, offer = mirror_of(tmp_path), written.write(1, CONTENT)
    fill(mirror, written, offer)
    assert not is_served(mirror.path, offer.name)
    assert mirror.newest is None
    mirror.finish(offer)
    assert files_of(mirror.path / offer.name) == files_of(written.stream.path / offer.name)
    assert (mirror.newest, mirror.chain(offer.name)) == (offer.name, (offer.name,))


@pytest.mark.parametrize("at", range(len(CONTENT)))
def test_one_wrong_byte_is_found_and_its_file_alone_comes_again(
    tmp_path: Path, written: Written, at: int
):
    mirror, offer = mirror_of(tmp_path), written.write(1, CONTENT)
    fill(mirror, written, offer)
    path = mirror.path / f"{offer.name}.partial" / "rank00000.safetensors"
    path.write_bytes(CONTENT[:at] + bytes([CONTENT[at] ^ 1]) + CONTENT[at + 1 :])
    with pytest.raises(BadBytes, match="of 000000-version-1 is not what was sent"):
        mirror.finish(offer)
    assert not is_served(mirror.path, offer.name)
    there = {file.name: mirror.there(offer, file) for file in offer.files}
    assert there.pop("rank00000.safetensors") == 0
    assert all(there.values()), "what is whole is kept"
    fill(mirror, written, offer)
    mirror.finish(offer)
    assert is_served(mirror.path, offer.name)


def test_what_is_there_outlives_the_process_and_what_is_too_long_does_not(
    tmp_path: Path, written: Written
):
    offer = written.write(1, CONTENT)
    file = offer.files[1]
    assert file.name == "rank00000.safetensors"
    mirror_of(tmp_path).append(offer, file, 0, CONTENT[:7])
    mirror = mirror_of(tmp_path)
    assert mirror.there(offer, file) == 7
    fill(mirror, written, offer)
    mirror.finish(offer)
    again = mirror_of(tmp_path)
    assert again.newest == offer.name
    later = written.write(2, CONTENT, offer)
    again.append(later, later.files[1], 0, CONTENT + b"more")
    assert again.there(later, later.files[1]) == 0


def test_another_run_begins_with_nothing_and_another_site_keeps_its_own(
    tmp_path: Path, written: Written
):
    offer = written.write(1, CONTENT)
    first, other = mirror_of(tmp_path), mirror_of(tmp_path, owner="b")
    for mirror in (first, other):
        fill(mirror, written, offer)
        mirror.finish(offer)
    second = mirror_of(tmp_path, run="two")
    assert second.newest is None
    assert not first.path.exists()
    assert mirror_of(tmp_path, owner="b").newest == offer.name


def test_what_a_version_is_based_on_stays_with_it_and_all_else_goes(
    tmp_path: Path, written: Written
):
    mirror = mirror_of(tmp_path)
    whole = written.write(1, CONTENT)
    change = written.write(2, CONTENT[:9], whole)
    last = written.write(3, CONTENT[:8], change)
    anew = written.write(4, CONTENT)
    for offer in (whole, change, last, anew):
        fill(mirror, written, offer)
        mirror.finish(offer)
    assert mirror.chain(last.name) == (last.name, change.name, whole.name)
    mirror.append(written.write(5, CONTENT), anew.files[1], 0, b"part")
    mirror.keep([last.name])
    assert sorted(entry.name for entry in mirror.path.iterdir()) == [
        whole.name,
        change.name,
        last.name,
        "owner",
    ]
    mirror.keep([anew.name])  # it is gone
    assert mirror.newest is None


def test_changes_of_what_is_not_here_are_no_version(tmp_path: Path, written: Written):
    mirror, whole = mirror_of(tmp_path), written.write(1, CONTENT)
    change = written.write(2, CONTENT, whole)
    fill(mirror, written, change)
    with pytest.raises(BadOffer, match="base 000000-version-1 of 000001-version-2 is not here"):
        mirror.finish(change)
    assert not is_served(mirror.path, change.name)


def test_a_damaged_version_of_an_earlier_process_is_removed_with_its_changes(
    tmp_path: Path, written: Written
):
    mirror, whole = mirror_of(tmp_path), written.write(1, CONTENT)
    change = written.write(2, CONTENT, whole)
    for offer in (whole, change):
        fill(mirror, written, offer)
        mirror.finish(offer)
    (mirror.path / whole.name / MANIFEST).write_bytes(b"cut")
    again = mirror_of(tmp_path)
    assert again.newest is None
    assert [entry.name for entry in again.path.iterdir()] == ["owner"]


def test_a_manifest_of_other_files_or_another_base_is_refused(tmp_path: Path, written: Written):
    mirror, offer = mirror_of(tmp_path), written.write(1, CONTENT)
    fewer = msgspec.structs.replace(offer, files=offer.files[:-1])
    fill(mirror, written, fewer)
    with pytest.raises(BadOffer, match="is not of what was offered"):
        mirror.finish(fewer)
    later = written.write(2, CONTENT, offer)
    whole = msgspec.structs.replace(later, base=None)
    fill(mirror, written, whole)
    with pytest.raises(BadOffer, match="is not of what was offered"):
        mirror.finish(whole)


DIGEST = bytes(32)
GOOD = Offer(1, "000000-version-1", None, [FileSize(MANIFEST, 9, DIGEST)])


@pytest.mark.parametrize(
    "file",
    ["../owner", "/etc/passwd", "rank00000.safetensors/../../x", "", ".", "owner", "rank0"],
)
def test_a_file_that_no_version_has_is_refused(file: str):
    check_offer(GOOD)
    files = [*GOOD.files, FileSize(file, 1, DIGEST)]
    with pytest.raises(BadOffer, match="no name of a file"):
        check_offer(msgspec.structs.replace(GOOD, files=files))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "../../000000-version-1"}, "no name of a version"),
        ({"name": "000000-version-1.partial"}, "no name of a version"),
        ({"name": "000000-version-2"}, "not of the weights' version 1"),
        ({"base": "/tmp"}, "no name of a version"),
        ({"base": "000000-version-1"}, "is not older"),
        ({"base": "000001-version-0"}, "is not older"),
        ({"files": []}, "are not those of a version"),
        ({"files": GOOD.files * 2}, "are not those of a version"),
        ({"files": [FileSize(MANIFEST, 0, DIGEST)]}, "cannot have 0 bytes"),
        ({"files": [FileSize(MANIFEST, -1, DIGEST)]}, "cannot have -1 bytes"),
        ({"files": [FileSize(MANIFEST, 1 << 40, DIGEST)]}, "cannot have"),
        ({"files": [FileSize(MANIFEST, 9, b"short")]}, "cannot have 9 bytes"),
    ],
)
def test_an_offer_that_can_be_no_version_is_refused(changed: dict[str, object], said: str):
    with pytest.raises(BadOffer, match=said):
        check_offer(msgspec.structs.replace(GOOD, **changed))
