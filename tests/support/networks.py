"""Machines on one network, each a network namespace of its own; they end with the test.

Nothing outside is touched: the namespaces lie in a user namespace of their own, and what is started
in them ends with the process that holds them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.paths import ROOT

LISTENING = "0A"  # in /proc/net/tcp
# in its own user and network namespace: a bridge, and a held namespace for each address
HOLD = r"""
set -e
ip link set lo up
ip link add net0 type bridge
ip link set net0 up
i=0
for address in "$@"; do
  unshare --net sleep infinity > /dev/null &
  child=$!
  while [ "$(readlink /proc/$child/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
  ip link add port$i type veth peer name eth0 netns $child
  ip link set port$i master net0 up
  nsenter --net --target $child sh -c \
    "ip link set lo up; ip addr add $address/24 dev eth0; ip link set eth0 up"
  echo $child
  i=$((i+1))
done
echo ready
read end || true  # until the test, or the process that runs it, is over
kill $(jobs -p)
wait
"""


@dataclass(frozen=True)
class Network:
    """Namespaces by address. holder: the process in whose network the bridge net0 is."""

    holder: int
    machines: dict[str, int]

    def inside(self, address: str | None) -> list[str]:
        """The start of a command line that runs on a machine; None: where the bridge is."""
        pid = self.holder if address is None else self.machines[address]
        return ["nsenter", "--user", "--preserve-credentials", "--net", "--target", str(pid)]

    def start(self, address: str | None, *words: str) -> subprocess.Popen[str]:
        """Start a Python program on the machine with this address; None: where the bridge is."""
        return subprocess.Popen(
            [*self.inside(address), sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self, address: str) -> set[psutil.Process]:
        """What runs on a machine now, besides the process that holds it."""
        holder = self.machines[address]
        here = os.readlink(f"/proc/{holder}/ns/net")
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has ended
                if process.pid != holder and os.readlink(f"/proc/{process.pid}/ns/net") == here:
                    found.add(process)
        return found

    def listening(self, address: str) -> set[str]:
        """The addresses on which a machine has a TCP listener."""
        found: set[str] = set()
        for kind, bits in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            table = Path(f"/proc/{self.machines[address]}/net/{kind}").read_text().splitlines()
            for _, local, _, state, *_ in (row.split() for row in table[1:]):
                if state == LISTENING:
                    words = struct.iter_unpack("=I", bytes.fromhex(local.partition(":")[0]))
                    packed = b"".join(struct.pack(">I", word) for (word,) in words)
                    found.add(socket.inet_ntop(bits, packed))
        return found


def why_not() -> str | None:
    """Why this machine makes no namespaces, None where it does."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = "unshare --user --map-root-user --net ip link add name net0 type bridge"
    done = subprocess.run(tried.split(), capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()


@contextlib.contextmanager
def network(addresses: Sequence[str], scratch: Path) -> Iterator[Network]:
    """A machine for each address, joined by a bridge."""
    script = scratch / "network.sh"
    script.write_text(HOLD)
    command = ["unshare", "--user", "--map-root-user", "--net", "bash", str(script)]
    holder = subprocess.Popen(
        [*command, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        lines = [line.strip() for line in iter(holder.stdout.readline, "ready\n") if line]
        assert holder.poll() is None, f"no network: {lines}"
        yield Network(holder.pid, dict(zip(addresses, map(int, lines), strict=True)))
    finally:
        holder.stdin.close()
        holder.wait(10)
