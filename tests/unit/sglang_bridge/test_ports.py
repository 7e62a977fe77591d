"""Ports for servers that are about to start."""

import socket

import pytest

from sglang_bridge import ports


def test_a_free_port_lies_below_the_ephemeral_range_and_can_be_bound():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_ephemeral = int(file.read().split()[0])
    found = {ports.free_port() for _ in range(20)}
    assert len(found) > 10, "processes that start together must not ask for the same port"
    assert all(ports.FIRST <= port <= min(ports.LAST, first_ephemeral) for port in found)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", found.pop()))


def test_a_port_in_use_is_not_given_out(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", taken)
        monkeypatch.setattr(ports, "LAST", taken)
        with pytest.raises(OSError, match="no free port"):
            ports.free_port()
