"""Says for `opd check` what a weight sync by way of a directory takes, and warns of too little."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.table import Table

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.output import byte_text, new_table
from megatron_opd.weight_sync.disk_plan import disk_sizes
from megatron_opd.weight_sync.disk_versions import left_behind


def disk_table(config: Config, spec: ModelSpec, received: int) -> Table:
    """Return the table. received: bytes that the busiest server rank reads of a whole version."""
    sizes, settings = disk_sizes(config, spec), config.weight_sync
    table = new_table("a weight sync by way of weight_sync.directory", ("what", "most"))
    table.add_row("bytes of a whole version", byte_text(sizes.whole))
    table.add_row("bytes of it written by a learner rank", byte_text(sizes.written))
    table.add_row("bytes of it read by a server rank", byte_text(received))
    table.add_row("whole versions there at once", str(sizes.wholes))
    if settings.delta:
        table.add_row("versions of changes there besides", str(sizes.changes))
        table.add_row("last version in memory of a learner rank", byte_text(sizes.written))
    table.add_row("space of the whole versions", byte_text(sizes.space))
    free = free_bytes(settings.directory)
    table.add_row("free here", "unknown: not on this machine" if free is None else byte_text(free))
    return table


def disk_notes(config: Config, spec: ModelSpec) -> list[str]:
    """Return one line if the directory has too little space, and one if earlier runs use some."""
    directory = config.weight_sync.directory
    if config.weight_sync.type != "disk" or directory is None:
        return []
    sizes, free, found = disk_sizes(config, spec), free_bytes(directory), list[str]()
    if free is not None and free < sizes.space:
        found.append(
            f"weight_sync.directory {directory} has {byte_text(free)} free, and {sizes.wholes} "
            f"whole versions take {byte_text(sizes.space)}: free some space, or lower "
            "weight_sync.keep_versions"
        )
    earlier = left_behind(directory)
    if earlier:
        found.append(
            f"weight_sync.directory holds weights of {len(earlier)} other runs, as {earlier[0]}: "
            "remove those of runs that have ended"
        )
    return found


def free_bytes(directory: Path | None) -> int | None:
    """Return the free bytes where `directory` is or will be made; None: that is not here."""
    if directory is None:
        return None
    for place in (directory, directory.absolute().parent):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
