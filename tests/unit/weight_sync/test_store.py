"""Stores and process groups listen on one address alone."""

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_opd.weight_sync.store import bound_store, keep_groups_on
from sglang_bridge.listening import interface_of
from sglang_bridge.ports import free_port
from tests.support.sockets import listening

LIMIT = timedelta(seconds=20)
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def doors(port: int) -> list[str]:
    return [ip for ip, at, _ in listening(os.getpid()) if at == port]


def test_a_store_listens_on_its_host_alone_and_works():
    """Before: `[('::', PORT, ...)]`."""
    port = free_port()
    store = bound_store("127.0.0.1", port, 1, LIMIT)
    assert doors(port) == ["127.0.0.1"]
    peer = TCPStore("127.0.0.1", port, 1, is_master=False, timeout=LIMIT)
    peer.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bound_store("127.0.0.1", taken.getsockname()[1], 1, LIMIT)


def test_torchrun_s_store_listens_on_its_master_address_alone(tmp_path: Path):
    """And no directory is left. Before: `[('::', 23456, 'pt_elastic')]`, /tmp/torchelastic_*."""
    port = free_port()
    world = [sys.executable, "-m", "megatron_opd.learner.torchrun", "--nproc-per-node=1"]
    world += ["--master-addr=127.0.0.1", f"--master-port={port}", "--no-python", "sleep", "600"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(world, stderr=subprocess.DEVNULL, env=environment)
    family = psutil.Process(started.pid)
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not any(process.name() == "sleep" for process in children):
            children = family.children(recursive=True)
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [(ip, at) for ip, at, _ in listening(started.pid)] == [("127.0.0.1", port)]
        assert len(list(tmp_path.iterdir())) == 1
        started.terminate()
        started.wait(timeout=60)
        assert list(tmp_path.iterdir()) == []
    finally:
        started.kill()
        started.wait()
        for left in psutil.wait_procs(children, timeout=20)[1]:
            left.kill()


def test_groups_stay_on_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch):
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert interface_of("localhost") == loopback
    assert interface_of("192.0.2.1") is None
    assert interface_of("no such host") is None
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    keep_groups_on("127.0.0.1")
    assert not any(name in os.environ for name in INTERFACE_VARIABLES), "ranks must reach others"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv(INTERFACE_VARIABLES[0], "mine")
    monkeypatch.setenv(INTERFACE_VARIABLES[1], "gone in a moment")
    monkeypatch.delenv(INTERFACE_VARIABLES[1])
    keep_groups_on("127.0.0.1")
    assert [os.environ[name] for name in INTERFACE_VARIABLES] == ["mine", f"={loopback}"]


def test_a_named_interface_is_that_of_every_node(monkeypatch: pytest.MonkeyPatch):
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "another")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    keep_groups_on("192.0.2.1", loopback)
    assert [os.environ[name] for name in INTERFACE_VARIABLES] == [loopback, f"={loopback}"]
    with pytest.raises(ValueError, match=r"cluster\.interface .* got 'none0', and this one has .*"):
        keep_groups_on("127.0.0.1", "none0")
