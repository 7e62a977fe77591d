"""What a user reads where there is no Ray cluster."""

import signal
import socket
import sys
from pathlib import Path

import pytest

from megatron_opd.config.ray import RayConfig
from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.ray_cluster import RayLauncher


def refusal(settings: RayConfig) -> str:
    launcher = RayLauncher(settings)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(CannotPlace) as error:
        launcher.reserve([Need("student", 0, 1)], print)
    assert signal.getsignal(signal.SIGTERM) is handler
    launcher.close()
    return str(error.value)


def test_ray_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refusal(RayConfig()) == (
        "cluster.type ray needs the package ray[default]==2.60.0: pip install 'megatron-opd[ray]'"
    )


def test_a_head_that_does_not_listen_is_one_line():
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        assert refusal(RayConfig(address=address)) == (
            "cluster.ray.address must be a Ray cluster that this machine belongs to, got "
            f"{address}: [Errno 111] Connection refused; start one with `ray start`, or name its "
            "head"
        )


def test_no_cluster_on_this_machine_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = refusal(RayConfig())
    assert line.startswith("cluster.ray.address must be a Ray cluster that this machine belongs to")
    assert ", got auto: Could not find any running Ray instance" in line
    assert "\n" not in line


def test_an_address_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert f"got auto (RAY_ADDRESS={address}): [Errno 111]" in refusal(RayConfig())
