"""Asks Slurm what a job's allocation is, and whether its nodes are up.

Invariant: what is read is what `scontrol` says of nodes and jobs, which is the same on every node
of a job, and not the environment, which tells of the first node alone.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_opd.launch.launcher import CannotPlace

ANSWER_S = 60.0  # a busy controller is slow
START_IT = (
    "start the run with `sbatch --nodes=N examples/cluster/job.slurm CONFIG`, or within `salloc`, "
    "or set another cluster.type"
)
# `Nodes=n[1-2] CPU_IDs=0-63 Mem=0 GRES=gpu:a100:4(IDX:0-3)`, one such line for equal nodes
_OF_NODES = re.compile(r"\bNodes=(\S+)\s+CPU_IDs=\S*\s+Mem=\S*\s+GRES=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:(\d+)")
_FIELD = re.compile(r"\b(NodeName|NodeAddr|State)=(\S+)")
# of a node that is not there; NODE* does not answer
_LOST = {"DOWN", "FAIL", "ERROR", "UNKNOWN", "FUTURE", "POWERED_DOWN", "POWERING_DOWN"}


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """Describes one node of the allocation. gpus: how many of its GPUs the job has."""

    name: str
    host: str
    gpus: int


def job_id(environment: Mapping[str, str]) -> int:
    """Return the id of the job that this process is in. CannotPlace: it is in none."""
    given = environment.get("SLURM_JOB_ID", "")
    if not given.isdecimal():
        raise CannotPlace(
            f"cluster.type=slurm needs an allocation, and SLURM_JOB_ID is not set; {START_IT}"
        )
    return int(given)


def allocated(job: int) -> tuple[SlurmNode, ...]:
    """Return the job's nodes in their order. CannotPlace: Slurm does not say."""
    described = ask("scontrol", "--details", "show", "job", str(job))
    listed = re.search(r"^\s*NodeList=(\S+)", described, re.MULTILINE)
    if listed is None or listed[1] == "(null)":
        raise CannotPlace(f"Slurm's job {job} has no nodes; {START_IT}")
    names = hostnames(listed[1])
    gpus = {
        name: count
        for expression, count in gpus_by_nodes(described)
        for name in hostnames(expression)
    }
    given = addresses(ask("scontrol", "--oneliner", "show", "node", listed[1]))
    hosts = {name: resolved(given[name]) for name in names}
    return tuple(SlurmNode(name, hosts[name], gpus.get(name, 0)) for name in names)


def as_others_see(nodes: Sequence[SlurmNode], here: str | None) -> tuple[SlurmNode, ...]:
    """Return the nodes, each with an address at which the others reach it.

    here: the node that this process is on. Where its own hosts file gives its name a loopback
    address, which Debian's does, the address is that of its interface to another node.
    """
    others = [node.host for node in nodes if not node.host.startswith("127.")]
    return tuple(
        replace(node, host=own_address(others[0]))
        if node.name == here and others and node.host.startswith("127.")
        else node
        for node in nodes
    )


def own_address(host: str) -> str:
    """Return the address of this machine's interface to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((host, 9))
        return str(unsent.getsockname()[0])


def gpus_by_nodes(described: str) -> list[tuple[str, int]]:
    """Return (expression of nodes, GPUs of each) from `scontrol --details show job`."""
    return [
        (nodes, sum(map(int, _GPUS.findall(gres)))) for nodes, gres in _OF_NODES.findall(described)
    ]


def addresses(described: str) -> dict[str, str]:
    """Return {node: its address or name on the network} from `scontrol -o show node`."""
    lines = [dict(_FIELD.findall(line)) for line in described.splitlines()]
    return {line["NodeName"]: line["NodeAddr"] for line in lines if "NodeAddr" in line}


def lost(names: Sequence[str]) -> set[str]:
    """Return those of the nodes that run nothing now: they are down, or do not answer."""
    described = ask("scontrol", "--oneliner", "show", "node", ",".join(names))
    lines = [dict(_FIELD.findall(line)) for line in described.splitlines()]
    return {line["NodeName"] for line in lines if "State" in line and is_lost(line["State"])}


def is_lost(state: str) -> bool:
    """Return whether this is the state of a node that runs nothing, such as `DOWN+DRAIN`."""
    return "*" in state or bool(_LOST & set(state.split("+")))


def hostnames(expression: str) -> list[str]:
    """Return the nodes of an expression such as `n[1-3]`."""
    return ask("scontrol", "show", "hostnames", expression).split()


def resolved(host: str) -> str:
    """Return the IPv4 address of a node. CannotPlace: its name has none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotPlace(
            f"Slurm's node address {host!r} cannot be resolved here ({error.strerror}); set "
            "NodeAddr in slurm.conf, or add it to the hosts"
        ) from None
    return str(found[0][4][0])


def ask(*command: str) -> str:
    """Return what one of Slurm's commands prints. CannotPlace: it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except FileNotFoundError:
        raise CannotPlace(
            f"cluster.type=slurm needs Slurm's programs on PATH, {command[0]} is not there; "
            "run it on a node of the cluster, or set another cluster.type"
        ) from None
    except subprocess.TimeoutExpired:
        raise CannotPlace(f"`{_words(command)}` did not answer within {ANSWER_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise CannotPlace(
            f"`{_words(command)}` failed with exit code {error.returncode}: "
            f"{' '.join(error.stderr.split())}"
        ) from None
    return done.stdout


def _words(command: Sequence[str]) -> str:
    return " ".join(command)
