"""Keys of sites: made once, private, kept over a resumed run."""

import stat

import pytest
import zmq

from megatron_opd.config.sites import LEARNER_KEYS
from megatron_opd.sites.keys import LearnerKeys, SiteKeys, keys_file, site_keys

ADDRESS = "tcp://127.0.0.1:32000"


def test_every_site_gets_a_pair_that_the_learner_knows(tmp_path):
    keys = site_keys(tmp_path, ["a", "b"], ADDRESS)
    for name in "ab":
        mine = SiteKeys.read(keys_file(tmp_path, name))
        assert mine.address == ADDRESS
        assert mine.learner == keys.public
        assert zmq.curve_public(mine.secret) == keys.sites[name]
    assert keys.sites["a"] != keys.sites["b"]


def test_files_are_private_and_the_learners_holds_no_secret_of_a_site(tmp_path):
    site_keys(tmp_path, ["a"], ADDRESS)
    for name in ("a", LEARNER_KEYS):
        assert stat.S_IMODE(keys_file(tmp_path, name).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "sites").stat().st_mode) == 0o700
    secret = SiteKeys.read(keys_file(tmp_path, "a")).secret.decode()
    assert secret not in keys_file(tmp_path, LEARNER_KEYS).read_text()
    assert secret not in repr(SiteKeys.read(keys_file(tmp_path, "a")))


def test_keys_are_kept_and_a_file_that_was_moved_is_not_made_again(tmp_path):
    first = site_keys(tmp_path, ["a"], ADDRESS)
    keys_file(tmp_path, "a").unlink()
    again = site_keys(tmp_path, ["a", "b"], ADDRESS)
    assert again.secret == first.secret
    assert again.sites["a"] == first.sites["a"]
    assert not keys_file(tmp_path, "a").exists()
    assert SiteKeys.read(keys_file(tmp_path, "b")) is not None


def test_another_address_is_written_with_the_same_secret(tmp_path):
    site_keys(tmp_path, ["a"], ADDRESS)
    before = SiteKeys.read(keys_file(tmp_path, "a"))
    site_keys(tmp_path, ["a"], "tcp://10.0.0.1:5555")
    after = SiteKeys.read(keys_file(tmp_path, "a"))
    assert (after.address, after.secret) == ("tcp://10.0.0.1:5555", before.secret)


def test_a_site_that_is_no_member_any_more_is_not_admitted(tmp_path):
    site_keys(tmp_path, ["a", "b"], ADDRESS)
    assert set(site_keys(tmp_path, ["b"], ADDRESS).sites) == {"b"}


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"secret": 1, "sites": 2}'])
@pytest.mark.parametrize("kind", [SiteKeys, LearnerKeys])
def test_a_damaged_file_is_one_line(tmp_path, content, kind):
    path = tmp_path / "x.keys"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ValueError, match="damaged") as refused:
        kind.read(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path):
    site_keys(tmp_path, ["a"], ADDRESS)
    keys_file(tmp_path, "a").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        SiteKeys.read(keys_file(tmp_path, "a"))


def test_no_file_is_no_keys(tmp_path):
    assert SiteKeys.read(tmp_path / "none") is None
    assert LearnerKeys.read(tmp_path / "none") is None
