"""Decides which GPUs of one node every process of a run uses.

Invariants: the ranks of one server, and of the learner, are on different GPUs; no two processes
share a GPU unless sharing is allowed or they work in turn; a list in the configuration is kept as
it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_opd.launch.parts import LEARNER, GpuPart, Gpus, gpus_needed
from megatron_opd.launch.windows import LAYOUTS, Layout, least_used


@dataclass(frozen=True, slots=True)
class Placement:
    """Says which GPUs every process uses.

    names: what CUDA calls each GPU of the node. groups: the GPUs of every server of a role, and of
    the learner, as indices into names; empty on a node without a GPU.
    """

    names: tuple[str, ...] = ()
    groups: Mapping[str, tuple[Gpus, ...]] = field(default_factory=dict[str, tuple[Gpus, ...]])

    def of(self, key: str, index: int = 0) -> Gpus | None:
        """Return the GPUs of server `index` of a role, or of the learner; None: it is given none.

        None leaves a process what it inherits.
        """
        groups = self.groups.get(key)
        return None if groups is None else groups[index]

    def visible(self, key: str, index: int = 0) -> tuple[str, ...] | None:
        """Return what CUDA calls the GPUs of a process, for its CUDA_VISIBLE_DEVICES."""
        gpus = self.of(key, index)
        return None if gpus is None else tuple(self.names[gpu] for gpu in gpus)

    @property
    def line(self) -> str:
        """Returns what runs where: `learner 0-1, student 2 3 4, teacher 5-6`."""
        return ", ".join(
            f"{key} {' '.join(map(gpu_text, groups))}" for key, groups in self.groups.items()
        )

    def shared(self, *keys: str) -> int | None:
        """Return the first GPU that several processes of these parts use, if there is one."""
        used = [gpu for key in keys for group in self.groups.get(key, ()) for gpu in group]
        return min((gpu for gpu in used if used.count(gpu) > 1), default=None)


UNPLACED = Placement()
"""Leaves every process what it inherits."""


def gpu_text(gpus: Gpus) -> str:
    """Return `3`, `0-3` for neighbours, or `0,4,6`."""
    if len(gpus) > 1 and gpus == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))


def place(
    parts: Sequence[GpuPart],
    names: Sequence[str],
    *,
    share: bool = False,
    in_turn: Collection[str] = (),
) -> Placement:
    """Lay the parts out over a node's GPUs, in order. Raises ValueError with one line for the user.

    names: what CUDA calls the GPUs; none: a node without a GPU. share: processes may share a GPU
    (cluster.share_gpus). in_turn: the keys of parts that never work at once (schedule.time_shared),
    each of which takes what the parts besides them leave. Otherwise no two parts name one GPU
    (config/rules.py). A part keeps the GPUs that it names; the others fill what is free, each group
    in neighbouring GPUs where possible.
    """
    num_gpus = len(names)
    for part in parts:
        _check_named(part, num_gpus)
    if num_gpus == 0:
        return UNPLACED
    for layout in (*LAYOUTS, *([least_used] if share else [])):
        found = _laid_out(parts, num_gpus, layout, in_turn)
        if found is not None:
            return Placement(tuple(names), found)
    raise ValueError(_too_few(parts, num_gpus, share=share, in_turn=in_turn))


def place_server(part: GpuPart, index: int, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return what CUDA calls the GPUs of a server that is started alone; None: there is no GPU.

    These are the ones that its section names for it; otherwise the node's GPUs are dealt out in
    blocks of `size`, to server 0 and so on, from GPU 0 again after the last. Raises ValueError.
    """
    num_gpus = len(names)
    _check_named(part, num_gpus)
    if num_gpus == 0:
        return None
    if part.gpus is not None:
        if index >= part.groups:
            raise ValueError(
                f"{part.key}.gpus names the GPUs of {part.groups} servers ({part.key}.servers), "
                f"got --index {index}; name those of all servers or leave it null"
            )
        return tuple(names[gpu] for gpu in part.named[index])
    if part.size > num_gpus:
        raise ValueError(_too_few([part], num_gpus, share=True))
    first = index % (num_gpus // part.size) * part.size
    return tuple(names[first : first + part.size])


def _check_named(part: GpuPart, num_gpus: int) -> None:
    """Raise ValueError when a part names a GPU that the node does not have."""
    beyond = [gpu for gpu in part.gpus or () if gpu >= num_gpus]
    if beyond and num_gpus == 0:
        raise ValueError(
            f"{part.key}.gpus must be null on a node without a GPU that this process may use, got "
            f"{list(part.gpus or ())}; leave it out to run on the CPU, or see CUDA_VISIBLE_DEVICES"
        )
    if beyond:
        raise ValueError(
            f"{part.key}.gpus must be of 0..{num_gpus - 1}, the {num_gpus} GPUs that this process "
            f"may use on this node, got {beyond[0]}; name others, or see CUDA_VISIBLE_DEVICES"
        )


def _laid_out(
    parts: Sequence[GpuPart], num_gpus: int, layout: Layout, in_turn: Collection[str]
) -> dict[str, tuple[Gpus, ...]] | None:
    """Return the GPUs of every group, or None where this way of laying out finds no room."""
    held = {part.key: list(part.named) for part in parts}
    for part in parts:
        groups, start = held[part.key], 0
        uses = [0] * num_gpus  # by processes that it works beside
        for key, others in held.items():
            if key == part.key or not (key in in_turn and part.key in in_turn):
                for gpu in (gpu for group in others for gpu in group):
                    uses[gpu] += 1
        while len(groups) < part.groups:
            gpus = layout(uses, part.size, start)
            if gpus is None:
                return None
            for gpu in gpus:
                uses[gpu] += 1
            groups.append(gpus)
            start = gpus[0]
    return {key: tuple(groups) for key, groups in held.items()}


def _too_few(
    parts: Sequence[GpuPart], num_gpus: int, *, share: bool, in_turn: Collection[str] = ()
) -> str:
    needs = ", ".join(f"{part.key} {part.total} ({part.count})" for part in parts)
    if share:
        part = max(parts, key=lambda part: part.size)
        key = "learner.parallel" if part.key == LEARNER else f"{part.key}.tp"
        return (
            f"{key} must fit on this node, because ranks of one group never share a GPU, got "
            f"{part.size} ranks and {num_gpus} GPUs; lower it"
        )
    return (
        f"the parts of the run need {gpus_needed(parts, in_turn)} GPUs and this process may use "
        f"{num_gpus}: {needs}; lower these counts, start servers elsewhere (urls), or set "
        "cluster.share_gpus: true"
    )
