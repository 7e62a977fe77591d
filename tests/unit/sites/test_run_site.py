"""`opd site` refuses bad input in one line, before anything is started."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from megatron_opd.checkpoint.run_lock import RunLock
from megatron_opd.cli.main import main
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import RunFailed, UserError
from megatron_opd.launch.health import EngineLost
from megatron_opd.sites import run_site
from megatron_opd.sites.keys import SiteKeys, keys_file
from megatron_opd.sites.learner_watchdog import LearnerGone
from megatron_opd.sites.sampling import NoSuchTeacher
from megatron_opd.sites.site_ready import SiteReady, get_site_ready, read_input
from megatron_opd.wire.link.events import LinkRefused
from sglang_bridge.errors import BadReply
from tests.support.cli_cases import refused, small_config, tiny_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models(tmp_path_factory.mktemp("models"))


def tree_of(tmp_path: Path, models: Path) -> dict[str, Any]:
    (tmp_path / "weights").mkdir()
    tree = small_config(tmp_path, models)
    tree["student"]["startup_timeout_s"] = 0.3
    tree["weight_sync"] = {"type": "disk", "directory": str(tmp_path / "weights")}
    tree["sites"] = {"members": {"far": {}}}
    return tree


def site(tmp_path: Path, tree: dict[str, Any], name: str, *arguments: str) -> int:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return main(["site", name, str(path), *arguments])


def write_keys(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    SiteKeys("tcp://127.0.0.1:1", public, secret).write(path)


def test_a_site_that_is_not_configured(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
):
    code = site(tmp_path, tree_of(tmp_path, models), "near")
    refused(capsys, code, "sites.members", "'near'", "the sites are: far")


def test_keys_that_do_not_come(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]):
    code = site(tmp_path, tree_of(tmp_path, models), "far")
    refused(capsys, code, "sites/far.keys", "startup_timeout_s = 0.3", "--keys")
    assert not (tmp_path / "run").exists(), "nothing is in the way of the run that comes"


def test_keys_that_others_may_read(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
):
    named = tmp_path / "elsewhere" / "my.keys"
    write_keys(named)
    named.chmod(0o644)
    code = site(tmp_path, tree_of(tmp_path, models), "far", "--keys", str(named))
    refused(capsys, code, str(named), "chmod 600")


def test_keys_that_are_damaged_show_no_secret(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
):
    path = keys_file(tmp_path / "run", "far")
    write_keys(path)
    path.write_text(path.read_text().replace('"learner": "', '"learner": "x'))
    code = site(tmp_path, tree_of(tmp_path, models), "far")
    refused(capsys, code, str(path), "damaged")


def test_a_site_has_one_process_at_a_time(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
):
    write_keys(keys_file(tmp_path / "run", "far"))
    with RunLock.take(tmp_path / "run" / "sites" / "far"):
        code = site(tmp_path, tree_of(tmp_path, models), "far")
    refused(capsys, code, "opd site far", "is held by pid")


def test_a_student_without_a_tokenizer(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).symlink_to(models / "student" / name)
    tree = tree_of(tmp_path, models)
    tree["student"]["model"] = str(tmp_path / "bare")
    refused(capsys, site(tmp_path, tree, "far"), "student.model", "no tokenizer")


def ready_of(tmp_path: Path, models: Path) -> SiteReady:
    tree = tree_of(tmp_path, models)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    site = read_input(load_config(Config, path, []), "far")
    (tmp_path / "far" / "logs").mkdir(parents=True)
    keys = SiteKeys("tcp://127.0.0.1:1", b"", b"")
    return get_site_ready(site, keys, tmp_path / "far", lambda *lines: None)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            LinkRefused("no such key"),
            UserError,
            "the learner's site refuses this site: no such key",
        ),
        (NoSuchTeacher("a teacher 'x'"), UserError, "opd site far: a teacher 'x'"),
        (LearnerGone("the learner's site is away"), UserError, "opd site far: the learner's site"),
        (UserError("student.base_port: taken"), UserError, "^student.base_port: taken$"),
        (BadReply("http://s:1: no draws"), RunFailed, "http://s:1: no draws; logs are in "),
        (EngineLost("student server is lost"), RunFailed, "student server is lost; logs are in "),
        (OSError(28, "No space left"), RunFailed, "No space left; its traceback is in .*site.log"),
        (KeyError("what"), RunFailed, "KeyError: 'what'; its traceback is in .*site.log"),
    ],
)
def test_what_ends_a_site_is_told_in_one_line(
    tmp_path: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    said: str,
):
    ready = ready_of(tmp_path, models)

    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_site, "bring_up", fail)
    with pytest.raises(kind, match=said) as raised:
        asyncio.run(run_site.serve(ready))
    assert "\n" not in str(raised.value)
