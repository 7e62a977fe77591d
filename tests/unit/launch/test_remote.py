"""Servers and learners that a launcher starts look like those of this machine."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_opd.launch.launcher import CannotPlace, Need, NodePlace, ProcessSpec
from megatron_opd.launch.remote import RemoteLearnerProcess, RemoteServer
from sglang_bridge.errors import PortInUse, ServerDied
from sglang_bridge.server.compiling import SAID
from tests.support.launching import Cluster

ANSWERS = """
import http.server, os, sys
from sglang_bridge.proof import proof
nonce = os.environ["SGLANG_BRIDGE_NONCE"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, challenge = self.path.partition("?challenge=")
        self.send_response(200 if path in ("/ready", "/ready/proof") else 404)
        self.end_headers()
        self.wfile.write(proof(nonce, challenge).encode())
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILS = "import sys; print('no such model'); sys.exit(3)"
WAITS = "import time; time.sleep(600)"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for child in made.children:
        child.stop(1)


def server(cluster: Cluster, tmp_path: Path, program: str, said: list[str]) -> RemoteServer:
    def make(place: NodePlace, log: Path) -> ProcessSpec:
        return ProcessSpec("student server", ("-c", program, str(place.port)), {}, log)

    (place,) = cluster.reserve([Need("student", 0, 0)], said.append)
    return RemoteServer(cluster, place, make, tmp_path / "student-0.log", said.append)


def test_a_server_s_life_and_its_next(cluster: Cluster, tmp_path: Path):
    said: list[str] = []
    one = server(cluster, tmp_path, ANSWERS, said)
    assert one.name == f"student server {one.url}"
    one.start()
    one.wait_ready(20)
    assert one.exit_code() is None
    one.stop(5)
    assert one.exit_code() is not None

    same = one.again()
    assert said == []
    assert cluster.children[-1].spec.log.name == "student-0.restart1.log"
    cluster.lost = {"n0"}
    other = same.again()
    assert said == ["n0 is lost"]
    other.start()
    other.wait_ready(20)
    assert other.url != one.url
    assert other.log_path.name == "student-0.restart2.log"
    assert "serving" in other.log_path.read_text()

    cluster.free = {}
    cluster.lost = {"n0", "n1"}
    with pytest.raises(CannotPlace, match="none left"):
        other.again()


def test_another_server_at_its_port_is_not_taken_for_it(cluster: Cluster, tmp_path: Path):
    """That of a run that was started with the same ports, a moment before."""
    said: list[str] = []
    one = server(cluster, tmp_path, ANSWERS, said)
    late = RemoteServer(
        cluster, one.place, one.make, tmp_path / "late.log", said.append, "student.base_port"
    )
    one.start()
    one.wait_ready(20)
    late.start()
    with pytest.raises(PortInUse, match=rf"^student.base_port: port {one.place.port} is in use on"):
        late.wait_ready(20)
    assert late.exit_code() is not None
    one.wait_ready(20)


def test_a_server_that_ends_at_once_shows_its_log(cluster: Cluster, tmp_path: Path):
    one = server(cluster, tmp_path, FAILS, [])
    one.start()
    with pytest.raises(ServerDied) as caught:
        one.wait_ready(20)
    told = str(caught.value)
    assert f"{one.name} on n0 ended with exit code 3 during start-up" in told
    assert "no such model" in told


def test_a_server_that_is_not_ready_in_time_is_ended(cluster: Cluster, tmp_path: Path):
    one = server(cluster, tmp_path, f"print({SAID + 'norm'!r}, flush=True)\n{WAITS}", [])
    one.start()
    with pytest.raises(ServerDied, match=r"was not ready within 0.6 s, .* compiled 1 kernels"):
        one.wait_ready(0.6)
    assert one.exit_code() is not None


def learner(cluster: Cluster, tmp_path: Path, *programs: str) -> RemoteLearnerProcess:
    def make(places: Sequence[NodePlace], log: Path) -> Sequence[ProcessSpec]:
        return [
            ProcessSpec(f"node {i}", ("-c", program), {}, log.with_name(f"{i}-{log.name}"))
            for i, program in enumerate(programs)
        ]

    needs = [Need("learner", i, 0) for i in range(len(programs))]
    places = cluster.reserve(needs, lambda line: None)
    return RemoteLearnerProcess(cluster, places, make, tmp_path / "learner.log", lambda line: None)


def until(happened: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_learner_has_ended_when_one_of_its_nodes_has(cluster: Cluster, tmp_path: Path):
    world = learner(cluster, tmp_path, WAITS, "import sys; sys.exit(0)", "import sys; sys.exit(7)")
    assert world.exit_code() is None
    world.start()
    until(lambda: cluster.children[2].exit_code() == 7)
    assert world.exit_code() == 7, "what failed, not what was done"
    world.stop(5)
    assert all(child.exit_code() is not None for child in cluster.children)
    another = world.again()
    assert another.log.name == "learner.restart1.log"
    another.start()
    assert len(cluster.children) == 6
    until(lambda: another.exit_code() == 7)


def test_a_lost_node_is_named_as_the_cause(cluster: Cluster, tmp_path: Path):
    world = learner(cluster, tmp_path, WAITS, WAITS)
    assert world.cause() is None
    world.start()
    assert world.cause() is None
    cluster.children[1].lost = True
    assert (world.exit_code(), world.cause()) == (1, "node n0 was lost")
    world.stop(0)
