"""API keys: where they come from, and that they are nowhere else."""

import json
from pathlib import Path

import pytest

from megatron_opd.cli.commands.serve import serve as serve_role
from megatron_opd.cli.main import build_parser
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError
from megatron_opd.launch import serve
from megatron_opd.launch.keys import named_key, role_key, run_keys
from megatron_opd.wire.keys import FILE_VARIABLE, KEYS_FILE, RunKeys
from sglang_bridge.server.spec import API_KEY_VARIABLE, ServerSpec, server_command, server_env
from tests.support.cli_cases import call, refused, small_config, tiny_models

NAME = "OPD_TEST_KEY"


def section(**fields: object) -> ServerConfig:
    return ServerConfig(model="m", **fields)


def test_servers_started_here_get_a_key_of_their_own():
    first, second = (role_key(section(), "student") for _ in range(2))
    assert first is not None
    assert len(first) >= 40
    assert first != second
    assert role_key(section(urls=("http://far:1",)), "student") is None
    assert named_key(section(), "student") is None


def test_a_named_key_is_used_for_both(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(NAME, "k" * 20)
    for fields in ({}, {"urls": ("http://far:1",)}):
        assert role_key(section(api_key_env=NAME, **fields), "teacher") == "k" * 20


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "unset or empty"),
        ("", "unset or empty"),
        ("hunter2\r\nX-Evil: 1", "printable ASCII"),
        ("hunter2 too", "printable ASCII"),
        ("hunter2\x1b[2J", "printable ASCII"),
        ("hunter2é", "printable ASCII"),
    ],
)
def test_a_bad_key_is_one_line_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
):
    monkeypatch.delenv(NAME, raising=False)
    if value is not None:
        monkeypatch.setenv(NAME, value)
    with pytest.raises(UserError, match=words) as caught:
        role_key(section(api_key_env=NAME), "teachers.math")
    message = str(caught.value)
    assert message.startswith(f"teachers.math.api_key_env: the environment variable {NAME} must")
    assert "hunter2" not in message
    assert message.isprintable()


def test_a_run_without_its_key_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(NAME, raising=False)
    tree = small_config(tmp_path, tiny_models(tmp_path))
    tree["student"]["api_key_env"] = NAME
    capsys.readouterr()
    refused(capsys, call(tmp_path, tree), "student.api_key_env", NAME)
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match="api_key_env"):
        section(api_key_env="sk-a secret by mistake")


def test_the_key_travels_in_the_environment_alone():
    spec = ServerSpec(model_path="m", role="student", port=1)
    assert server_env(spec, {}, api_key="hunter2")[API_KEY_VARIABLE] == "hunter2"
    assert API_KEY_VARIABLE not in server_env(spec, {API_KEY_VARIABLE: "another run's"})
    assert "hunter2" not in json.dumps(server_command(spec))
    assert "hunter2" not in repr(spec)


def test_a_served_role_gets_its_named_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = []
    monkeypatch.setattr(serve, "serve_until_ended", lambda *arguments: served.append(arguments))
    monkeypatch.setenv(NAME, "hunter2")
    tree = small_config(tmp_path, tiny_models(tmp_path))
    tree["student"] |= {"api_key_env": NAME, "base_port": 23_456}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    serve_role(build_parser().parse_args(["serve", "student", str(tmp_path / "c.yaml")]))
    ((command, environment),) = served
    assert environment[API_KEY_VARIABLE] == "hunter2"
    assert "hunter2" not in " ".join(command)


def run_config(tmp_path: Path, **student: object) -> Config:
    tree = small_config(tmp_path, tiny_models(tmp_path))
    tree["student"] |= student
    config = Config.model_validate(tree)
    config.run.dir.mkdir()
    return config


def test_a_runs_keys_lie_in_its_directory_while_it_lasts(tmp_path: Path):
    config = run_config(tmp_path)
    path = config.run.dir / KEYS_FILE
    with run_keys(config, ("student", "teacher")) as keys:
        assert RunKeys.read(path) == keys
        assert set(keys.servers) == {"student", "teacher"}
        assert role_key(config.student, "student", keys.servers) == keys.servers["student"]
    assert not path.exists()
    with run_keys(config, ("student",)) as later:
        assert later.learner != keys.learner
        assert later.servers["student"] != keys.servers["student"]


@pytest.mark.parametrize(
    "student", [{"urls": ["http://127.0.0.1:1"]}, {"api_key_env": "OPD_TEST_KEY"}]
)
def test_a_role_that_brings_its_own_key_gets_none(tmp_path: Path, student: dict[str, object]):
    with run_keys(run_config(tmp_path, **student), ("student", "teacher")) as keys:
        assert set(keys.servers) == {"teacher"}


def test_a_named_file_is_made_once_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, named = run_config(tmp_path), tmp_path / "my.keys"
    monkeypatch.setenv(FILE_VARIABLE, str(named))
    with run_keys(config, ("student",)) as first:
        assert not (config.run.dir / KEYS_FILE).exists()
    assert RunKeys.read(named) == first
    with run_keys(config, ("student",)) as second:
        assert second == first


def test_a_file_that_is_open_to_others_or_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, named = run_config(tmp_path), tmp_path / "my.keys"
    RunKeys.make().write(named)
    named.chmod(0o644)
    monkeypatch.setenv(FILE_VARIABLE, str(named))
    with pytest.raises(UserError, match="closed to others"), run_keys(config, ("student",)):
        pass
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "nowhere" / "my.keys"))
    with pytest.raises(UserError, match="cannot be written"), run_keys(config, ("student",)):
        pass


def test_a_server_that_others_reach_is_not_served_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    served = []
    monkeypatch.setattr(serve, "serve_until_ended", lambda *arguments: served.append(arguments))
    tree = small_config(tmp_path, tiny_models(tmp_path))
    tree["teacher"] |= {"host": "0.0.0.0", "base_port": 23_457}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    command = ["serve", "teacher", str(tmp_path / "c.yaml")]
    with pytest.raises(UserError, match=r"teacher\.api_key_env must .*teacher\.host 0\.0\.0\.0"):
        serve_role(build_parser().parse_args(command))
    assert served == []
    serve_role(build_parser().parse_args([*command, "--set", "security.insecure=true"]))
    assert len(served) == 1
