"""Draws which nodes and GPUs of a cluster a run uses: the map of `opd check` for ray and slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from rich.table import Table

from megatron_opd.config.roles import Role
from megatron_opd.config.schema import Config
from megatron_opd.errors import checked
from megatron_opd.launch.launcher import CannotPlace, Need
from megatron_opd.launch.machines import needs_of
from megatron_opd.launch.nodes import Node, NodeSpot, lay_out
from megatron_opd.launch.placement import gpu_text
from megatron_opd.output import byte_text, new_table

GPUS_OF_A_NODE = 8
MOST_ROWS = 32
Memory = Mapping[str, tuple[int, bool]]
"""Bytes on one GPU of a section's process, and whether they are all that it takes."""


def node_table(config: Config, roles: Sequence[Role], memory: Memory) -> Table:
    """Return a row for each process, on as few nodes of 8 GPUs as hold all. Raises UserError."""
    needs = checked(lambda: needs_of(config, roles, gpus=True))
    gpus = max(GPUS_OF_A_NODE, *(need.gpus for need in needs))
    names, spots = on_fewest(needs, gpus)
    table = new_table("GPU placement", ("node", "GPUs", "what runs there", "memory of each"), 3)
    ordered = sorted(
        zip(needs, spots, strict=True), key=lambda pair: (names.index(pair[1].node), pair[1].gpus)
    )
    for need, spot in ordered[:MOST_ROWS]:
        size, whole = memory[need.key]
        text = byte_text(size) + ("" if whole else " and KV cache")
        table.add_row(spot.node, gpu_text(spot.gpus), _name(need), text)
    more = [f"and {len(needs) - MOST_ROWS} more processes"] if len(needs) > MOST_ROWS else []
    drawn = f"drawn for {len(names)} nodes of {gpus} GPUs; {config.cluster.type} chooses which"
    table.caption = "\n".join([*more, drawn])
    return table


def on_fewest(needs: Sequence[Need], gpus: int) -> tuple[list[str], tuple[NodeSpot, ...]]:
    """Lay processes out on as few nodes of so many GPUs as hold them; return their names too."""
    for nodes in count(-(-sum(need.gpus for need in needs) // gpus)):
        names = list(map(str, range(nodes)))
        try:
            return names, lay_out(needs, [Node(name, gpus) for name in names])
        except CannotPlace:  # so many do not hold them; as many as there are processes do
            continue
    raise AssertionError("unreachable")


def _name(need: Need) -> str:
    ranks = f" ({need.gpus} ranks)" if need.gpus > 1 else ""
    return f"{need.name}{ranks}"
