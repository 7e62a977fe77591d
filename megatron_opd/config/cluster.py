"""Defines the sections of machines, of data workers, and of what a run may do without keys."""

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


class WorkersConfig(Section):
    """Says how many processes move the samples; docs/data_workers.md says when they are needed."""

    count: Annotated[int, Field(ge=0, le=1024)] = 0
    """Data workers. Each makes all requests to its part of the servers, checks the answers, judges
    them with verifier.workers processes of its own, and hands samples to the learner's ranks; the
    controller keeps their order alone. 0: the controller does all this itself, which is enough for
    some 250 samples of 4,096 tokens a second. Updates are the same with any number. Each takes a
    core while it is busy, and the memory of its share of the samples in flight."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often data workers that ended are started again, all together. What one held is sampled
    anew. After that a run goes on with those that are left, and ends with the last."""


class SecurityConfig(Section):
    """Says what a run may do without keys beyond this machine; docs/security.md says what has keys.

    What a run starts itself always has keys.
    """

    insecure: bool = False
    """Uses what has no key beyond this machine: servers at `urls`, or started by `opd serve`,
    without api_key_env, and a Ray cluster without token authentication. Whoever reaches these can
    change the student, read the data or run programs. false: they are refused."""
