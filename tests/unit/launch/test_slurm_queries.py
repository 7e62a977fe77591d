"""What is read from Slurm's own words; those of job and node are from release 22.05.8."""

import socket

import pytest

from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.slurm_queries import (
    SlurmNode,
    addresses,
    allocated,
    as_others_see,
    ask,
    gpus_by_nodes,
    is_lost,
    job_id,
    lost,
    resolved,
)
from tests.support.slurm import StandInNode, StandInSlurm

JOB = """JobId=1 JobName=job.sh
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-3]
   BatchHost=n1
   TRES=cpu=16,node=2,billing=16
   JOB_GRES=gpu:8
     Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:4(IDX:0-3)
     Nodes=n3 CPU_IDs=0-7 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:5),shard:8(IDX:0)
   Nodes=cpu1 CPU_IDs=0-7 Mem=0 GRES=
   MinCPUsNode=8 MinMemoryNode=0 MinTmpDiskNode=0
   TresPerNode=gres:gpu:4
"""


def test_the_gpus_of_a_job():
    assert gpus_by_nodes(JOB) == [("n[1-2]", 4), ("n3", 3), ("cpu1", 0)]


def test_the_addresses_of_nodes():
    line = "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=vm State=ALLOCATED Owner=N/A"
    assert addresses(f"{line}\n{line.replace('n1', 'n2').replace('0.7', '0.8')}\n\n") == {
        "n1": "10.0.0.7",
        "n2": "10.0.0.8",
    }


@pytest.mark.parametrize("state", ["DOWN", "DOWN*", "ALLOCATED*", "MIXED+DRAIN*", "DOWN+DRAIN"])
def test_a_node_that_is_lost(state: str):
    assert is_lost(state)


@pytest.mark.parametrize("state", ["ALLOCATED", "MIXED", "ALLOCATED+DRAIN", "IDLE+RESERVED"])
def test_a_node_that_runs_what_it_has(state: str):
    assert not is_lost(state)


def test_a_job(tmp_path, monkeypatch: pytest.MonkeyPatch):
    nodes = [
        StandInNode("n1", "gpu:4(IDX:0-3)"),
        StandInNode("n2", "gpu:a100:2(IDX:0,1)", address="localhost", state="DOWN*"),
        StandInNode("cpu1"),
    ]
    StandInSlurm(tmp_path, *nodes).enter(monkeypatch)
    assert [(n.name, n.host, n.gpus) for n in allocated(4711)] == [
        ("n1", "127.0.0.1", 4),
        ("n2", "127.0.0.1", 2),
        ("cpu1", "127.0.0.1", 0),
    ]
    assert lost(["n1", "n2", "cpu1"]) == {"n2"}


def test_a_node_whose_own_name_is_its_loopback(monkeypatch: pytest.MonkeyPatch):
    nodes = [SlurmNode("n1", "127.0.1.1", 8), SlurmNode("n2", "192.0.2.2", 8)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(("192.0.2.2", 9))
            own = unsent.getsockname()[0]
        except OSError:  # a machine without a route has no address either
            own = None
    if own is None:
        with pytest.raises(OSError, match="unreachable"):
            as_others_see(nodes, "n1")
    else:
        assert [node.host for node in as_others_see(nodes, "n1")] == [own, "192.0.2.2"]
    assert [node.host for node in as_others_see(nodes, "n2")] == ["127.0.1.1", "192.0.2.2"]
    alone = [SlurmNode("n1", "127.0.0.1", 8), SlurmNode("n2", "127.0.0.1", 8)]
    assert list(as_others_see(alone, "n1")) == alone  # a cluster of one machine


def test_outside_a_job():
    with pytest.raises(
        CannotPlace, match=r"cluster\.type=slurm needs an allocation, and SLURM_JOB_"
    ):
        job_id({})


def test_what_slurm_refuses_is_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch):
    StandInSlurm(tmp_path).enter(monkeypatch)
    with pytest.raises(CannotPlace, match="`scontrol show moon` failed with exit code 1: invalid"):
        ask("scontrol", "show", "moon")
    with pytest.raises(CannotPlace, match="needs Slurm's programs on PATH, sconfusion is not"):
        ask("sconfusion")
    with pytest.raises(CannotPlace, match="Slurm's job 4711 has no nodes"):
        allocated(4711)
    with pytest.raises(CannotPlace, match=r"node address 'no\.such\.invalid' cannot be resolved"):
        resolved("no.such.invalid")
