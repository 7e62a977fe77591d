"""Keys of weight_sync that belong to one transport are refused with another."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.digests import learner_digests
from megatron_opd.launch.servers import make_spec
from sglang_bridge.server.spec import WEIGHTS_DIR_VARIABLE, server_env
from tests.support.cli_cases import call, refused
from tests.support.config_files import minimal


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "disk"}, ["weight_sync", "directory must name a directory", "got null"]),
        ({"directory": "/w"}, ["directory needs type: disk, got type: shards; leave it out"]),
        ({"type": "broadcast", "delta": True}, ["delta needs type: disk, got type: broadcast"]),
        ({"type": "disk", "directory": " "}, ["weight_sync.directory", "must name a file or dir"]),
        ({"relay": True, "type": "broadcast"}, ["relay needs type: shards, got type: broadcast"]),
        ({"relay": True, "type": "a:B"}, ["relay needs type: shards", "set relay: false"]),
        ({"overlap": True, "type": "broadcast"}, ["overlap needs type: shards", "broadcast"]),
        ({"overlap": True, "type": "a:B"}, ["overlap needs type: shards", "set overlap: false"]),
        (
            {"overlap": True, "type": "disk", "directory": "/w"},
            ["overlap needs type: shards, got type: disk"],
        ),
        ({"type": "disk", "directory": "/w", "keep_versions": 0}, ["weight_sync.keep_versions"]),
        ({"type": "disk", "directory": "/w", "full_every": 0}, ["weight_sync.full_every"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], capsys: Any, section: dict[str, Any], words: list[str]
):
    config["weight_sync"] = section
    refused(capsys, call(tmp_path, config, verb="check"), *words)


def test_only_the_student_s_servers_may_read_there(tmp_path: Path, monkeypatch: Any):
    """By an absolute path, whatever directory they are started in; and none unless told."""
    monkeypatch.chdir(tmp_path)
    disk = minimal(weight_sync={"type": "disk", "directory": "weights"})
    model = Path("m")
    student = make_spec(disk, "student", 1234, 0, model)
    assert server_env(student, {})[WEIGHTS_DIR_VARIABLE] == str(tmp_path / "weights")
    outer = {WEIGHTS_DIR_VARIABLE: "/everything"}
    others = [make_spec(disk, "teacher", 1234, 0, model)]
    others.append(make_spec(minimal(), "student", 1234, 0, model))
    for spec in others:
        assert WEIGHTS_DIR_VARIABLE not in server_env(spec, outer)


def test_learner_and_controller_may_see_the_directory_under_different_paths(
    tmp_path: Path, dense: Path
):
    digests = [
        learner_digests(
            minimal(
                student={"model": str(dense)},
                weight_sync={"type": "disk", "directory": path, "delta": delta},
            )
        )
        for path, delta in (("/a", False), ("/b", False), ("/a", True))
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
