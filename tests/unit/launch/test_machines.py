"""What a run starts, and where, by cluster.type."""

from pathlib import Path
from typing import Any

import pytest

from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.launch import machines
from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.machines import machines_of
from tests.support.cli_cases import call, refused
from tests.support.config_files import minimal
from tests.support.launching import Cluster

ROLES = ("student", "teacher")


def launched(monkeypatch: pytest.MonkeyPatch, made: Cluster, **sections: Any) -> Config:
    monkeypatch.setitem(machines.LAUNCHERS, "slurm", lambda settings: made)
    tree = {"student": {"model": "s", "servers": 2}, "cluster": {"type": "slurm"}}
    return minimal(**(tree | sections))


def test_a_launcher_is_asked_for_all_places_and_closed(monkeypatch, tmp_path: Path):
    cluster, said = Cluster(gpus=8), []
    config = launched(
        monkeypatch,
        cluster,
        student={"model": "s", "servers": 2, "tp": 2},
        learner={"parallel": {"dp": 4}},
        cluster={"type": "slurm", "ranks_per_node": 2},
        run={"dir": str(tmp_path / "run")},
    )
    with machines_of(config, ROLES, said.append) as found:
        assert (found.starts, found.learner_here) == (True, False)
        assert cluster.needs == (
            Need("learner", 0, 2),
            Need("learner", 1, 2),
            Need("student", 0, 2),
            Need("student", 1, 2),
            Need("teacher", 0, 1),
        )
        assert found.line == "nodes: learner n0 n0, student n1 n1, teacher n2"
        servers = found.servers("student", tmp_path, "key")
        assert len({server.url for server in servers}) == 2
        specs = [child.spec for child in cluster.children]
        assert [spec.log.name for spec in specs] == ["student-0.log", "student-1.log"]
        resolved = str(tmp_path / "run" / "config.resolved.yaml")
        assert all(resolved in spec.arguments for spec in specs)
        assert not cluster.closed
    assert cluster.closed


def test_without_a_gpu_in_the_cluster_nothing_needs_one(monkeypatch):
    cluster = Cluster()
    with machines_of(launched(monkeypatch, cluster), ROLES, print):
        assert {need.gpus for need in cluster.needs} == {0}


def test_fixed_ports_are_kept(monkeypatch, tmp_path: Path):
    student = {"model": "s", "servers": 2, "base_port": 31000}
    config = launched(monkeypatch, Cluster(), student=student)
    with machines_of(config, ROLES, print) as found:
        urls = [server.url for server in found.servers("student", tmp_path, None)]
    assert urls == ["http://127.0.0.1:31000", "http://127.0.0.1:31001"]


def test_what_has_no_room_is_bad_input_and_the_launcher_is_closed(monkeypatch):
    cluster = Cluster(nodes=1, room=1)
    config = launched(monkeypatch, cluster)
    with (
        pytest.raises(UserError, match=r"^student needs a node"),
        machines_of(config, ROLES, print),
    ):
        raise AssertionError("unreachable")
    assert cluster.closed


def test_a_launcher_that_cannot_be_made_is_bad_input(monkeypatch):
    def not_here(settings: object) -> Cluster:
        raise CannotPlace("cluster.type: slurm needs a Slurm job, and this is none")

    monkeypatch.setitem(machines.LAUNCHERS, "slurm", not_here)
    config = minimal(cluster={"type": "slurm"})
    with pytest.raises(UserError, match="needs a Slurm job"), machines_of(config, ROLES, print):
        raise AssertionError("unreachable")


def test_external_needs_addresses(tmp_path, config, capsys):
    config["cluster"] = {"type": "external"}
    refused(capsys, call(tmp_path, config), "student.urls", "cluster.type: external")


def test_an_unknown_type_names_those_there_are(tmp_path, config, capsys):
    config["cluster"] = {"type": "kubernetes"}
    words = ("cluster.type", "local", "ray", "slurm", "external", "kubernetes")
    refused(capsys, call(tmp_path, config), *words)
