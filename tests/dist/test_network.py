"""Controller, learner and a stranger on three machines: network namespaces that the test makes."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_opd.wire.keys import KEYS_FILE, RunKeys
from tests.support.features import needs
from tests.support.networks import Network, network

CONTROLLER, LEARNER, STRANGER = "10.77.0.1", "10.77.0.2", "10.77.0.3"
PORT = "29400"
MARKER = "weights that nobody else may read"
QUICK = (
    "no keys",
    "a key of its own",
    "another run's learner",
    "replay of a true rank's bytes",
    "garbage",
    "escape codes",
    "HTTP",
    "1 GB message",
    "truncated, left",
)

pytestmark = [pytest.mark.dist, needs("namespaces")]


class End:
    """A program on one machine."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.process, self.out, self.into = process, process.stdout, process.stdin

    def hear(self, wanted: str | None = None) -> str:
        """The next line; wanted: the lines before it may be others, of a log."""
        lines: list[str] = []
        while line := self.out.readline():
            lines.append(line.strip())
            if wanted in (None, lines[-1]):
                return lines[-1]
        raise AssertionError(f"it ended: {lines}")

    def tell(self, line: str, wanted: str | None = None) -> str:
        """Say a line to it, and hear the answer."""
        self.into.write(f"{line}\n")
        self.into.flush()
        return self.hear(wanted)

    def end(self) -> str:
        self.into.close()
        return self.out.read()


class Ends:
    """Programs by role; all are ended at the end."""

    def __init__(self, machines: Network) -> None:
        self.machines, self.started = machines, list[subprocess.Popen[str]]()

    def start(self, address: str | None, role: str, *words: str) -> End:
        process = self.machines.start(address, "-m", "tests.support.far_ends", role, *words)
        self.started.append(process)
        return End(process)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with network([CONTROLLER, LEARNER, STRANGER], tmp_path) as machines:
        made = Ends(machines)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.wait()


def test_a_learner_joins_over_a_network_and_strangers_neither_join_nor_read(
    ends: Ends, tmp_path: Path
):
    keys, file, heard = RunKeys.make(), tmp_path / KEYS_FILE, tmp_path / "heard"
    keys.write(file)
    heard.mkdir()
    # on the cable of the controller's machine
    sniffer = ends.start(None, "sniffer", "port0", PORT, str(heard))
    sniffer.hear("sniffing")
    controller = ends.start(CONTROLLER, "controller", str(file), CONTROLLER, PORT)
    controller.hear("listening")
    rank = ends.start(LEARNER, "rank", str(file), CONTROLLER, PORT)
    controller.hear("ready")
    rank.hear("welcome")
    assert controller.tell(MARKER) == MARKER

    public = keys.ranks.controller.decode()
    stranger = ends.start(STRANGER, "attacker", CONTROLLER, PORT, public)
    stranger.hear("there")
    assert stranger.tell(json.dumps(["HTTP", ""])) != ""
    sniffer.end()
    recorded = {path.name: path.read_bytes() for path in heard.iterdir()}
    (said,) = (data for name, data in recorded.items() if name.startswith(LEARNER))
    assert any(b"GET / HTTP/1.1" in data for data in recorded.values()), "the sniffer hears"
    assert b"CURVE" in said
    assert not any(MARKER.encode() in data for data in recorded.values())
    for secret in (keys.controller, keys.learner):
        assert not any(secret in data for data in recorded.values())

    for name in QUICK:
        closed, answer, sent = json.loads(stranger.tell(json.dumps([name, said.hex()])))
        assert closed, name
        assert sent < 1 << 27, f"{name}: so much was taken"
        assert b"READY" not in bytes.fromhex(answer), name
        assert controller.tell(name, name) == name, "the run goes on"
    refused, rest = controller.end().split()[-1], rank.end()
    assert int(refused) >= len(QUICK)
    assert rest == ""
    assert rank.process.wait(10) == controller.process.wait(10) == 0
