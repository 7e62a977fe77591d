"""Defines the section that says what machines a run uses, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_opd.config.ray import RayConfig
from megatron_opd.config.section import FilePath, Processes, Seconds, Section

# as Linux takes them; gloo reads one name, NCCL would read a list of prefixes
InterfaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,15}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


LAUNCHED = ("ray", "slurm")
"""Types whose processes are placed on nodes by the cluster's own software."""


class ClusterConfig(Section):
    """Says on what machines the processes of a run are started, and how they share them."""

    type: Literal["local", "ray", "slurm", "external"] = "local"
    """What starts servers and learner. local: `opd run`, all on this machine; ray: on the nodes of
    a Ray cluster; slurm: on the nodes of the Slurm job that `opd run` is part of; external:
    something else, and `opd run` waits for them as `opd control` does. With ray and slurm models
    and run.dir lie at the same path on every node."""
    ranks_per_node: Processes = 8
    """With ray and slurm: ranks of the learner on each of its nodes, which must divide their number
    unless all fit on one. Raising it beyond a node's GPUs can never be met."""
    env: dict[VariableName, str] = Field(default_factory=dict[str, str])
    """With ray and slurm: environment variables for every server and the learner, such as
    {NCCL_SOCKET_IFNAME: ib0}. They are written to the run directory: no secrets."""
    interface: InterfaceName | None = None
    """Network interface, such as ib0, on which the groups of learner and servers listen: gloo's and
    NCCL's sockets. Groups cannot have keys: name one of a network that belongs to the cluster. It
    must be on every machine. null: the one of weight_sync.host or of a server's host; a learner of
    several nodes listens where gloo and NCCL choose."""
    share_gpus: bool = False
    """With local: lets several processes use one GPU, such as all of a run on a machine with a
    single one: lists of `gpus` may overlap, and what is laid out by itself starts again at GPU 0
    when none is free. Lower mem_fraction_static then: each server plans as if the GPU were its own.
    A learner and student servers that share one sync weights over gloo, which is slower. false: an
    overlap is an error."""
    fleet_file: FilePath | None = None
    """File with one url of a student server a line (`#` begins a comment), read every 2 s while the
    run is under way: a server that is added to it joins, once it answers, and one that goes away is
    removed, as by `opd fleet add` and `remove`. Servers that it never named are not touched. null:
    no file. Not with run.deterministic."""
    drain_s: Seconds = 300.0
    """Longest wait in seconds for a server that is being removed to finish the requests that it
    has; what is left is sent to the others, from its beginning. Raising it wastes fewer tokens and
    keeps the server longer."""
    ray: RayConfig = RayConfig()
    """The Ray cluster of type ray."""
