"""Makes the tables of a weight sync for `opd check`: layouts side by side, who sends what."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.table import Table

from megatron_opd.config.roles import followers, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.inputs.disk_space import disk_table
from megatron_opd.models.spec import ModelSpec
from megatron_opd.output import byte_text, new_table
from megatron_opd.sizing.learner import follower_bytes
from megatron_opd.sizing.matching import compared
from megatron_opd.sizing.servers import server_memory
from megatron_opd.weight_sync.following import as_students
from megatron_opd.weight_sync.sizes import sync_sizes


def sync_tables(config: Config, spec: ModelSpec, link_gbs: float) -> Iterator[Table]:
    """Yield the tables. link_gbs: GB/s that a rank sends or receives. ValueError: no plan."""
    yield _layouts(config, spec)
    if config.weight_sync.type == "shards":
        yield _transfers(config, spec, link_gbs)
        if followers(config):
            yield _followers(config, spec)
    if config.weight_sync.type == "disk":
        yield disk_table(config, spec, max(sync_sizes(config, spec).received))


def _followers(config: Config, spec: ModelSpec) -> Table:
    """Return what the learner's ranks keep for teachers that follow, and send them."""
    table = new_table(
        "teachers that follow the student",
        ("teacher", "source", "new weights every", "kept by a learner rank", "received by a rank"),
    )
    for role, source in followers(config).items():
        section = section_of(config, role)
        assert isinstance(section, TeacherConfig), "no student follows"
        updates = config.schedule.sync_every * math.ceil(source.period / config.schedule.sync_every)
        received = max(sync_sizes(as_students(config, role), spec).received)
        table.add_row(
            role,
            section.source.type,
            f"{updates} updates" if updates > 1 else "update",
            byte_text(follower_bytes(spec, config.learner, source)),
            byte_text(received),
        )
    table.caption = (
        "kept: on the device, beside the learner memory above; in checkpoints too. Their servers "
        "are this run's alone"
    )
    return table


def _layouts(config: Config, spec: ModelSpec) -> Table:
    table = new_table("learner and sampler", ("what", "learner", "sampler", "same"))
    for row in compared(config, spec):
        sampler, same = row.sampler, "no" if row.differs else "yes"
        if row.cut and config.student.urls:
            sampler, same = "the servers' own", "asked at the start"
        table.add_row(row.what, row.learner, sampler, same)
    return table


def _transfers(config: Config, spec: ModelSpec, link_gbs: float) -> Table:
    sizes, student = sync_sizes(config, spec), config.student
    servers, settings = len(student.urls) or student.servers, config.weight_sync
    senders, receivers = len(sizes.sent), servers * len(sizes.received)
    title = "a weight sync, shard to shard"
    if student.urls:
        title += f", to servers of student.tp {student.tp} and ep {student.ep}"
    table = new_table(title, ("what", "most"))
    table.add_row(f"bytes sent by a learner rank, of {senders}", byte_text(max(sizes.sent)))
    table.add_row("the busiest sender over the mean", f"{sizes.imbalance:.3f}")
    table.add_row(
        f"bytes received by a server rank, of {receivers}", byte_text(max(sizes.received))
    )
    table.add_row("its own share of the weights", byte_text(server_memory(spec, student).weights))
    if student.quantization is not None:
        plain = student.model_copy(update={"quantization": None})
        whole = byte_text(server_memory(spec, plain).weights)
        table.add_row(f"that share in {student.dtype}, not quantised", whole)
    if settings.relay:
        table.add_row("bytes passed on by a server rank", byte_text(max(sizes.passed_on)))
        table.add_row("pairs of ranks that talk", f"{sizes.pairs:,}")
        table.add_row("buffers of a learner rank", byte_text(2 * settings.bucket_bytes))
        table.add_row("buffers of a server rank", byte_text(4 * settings.bucket_bytes))
    else:
        table.add_row("pairs of ranks that talk", f"{sizes.pairs:,} of {senders * receivers:,}")
        table.add_row("buffers of every rank", byte_text(2 * settings.bucket_bytes))
    if settings.staging:
        table.add_row("shadow buffers of a server rank", byte_text(sizes.shadow))
    if settings.overlap:
        table.add_row("copy of its shards in a learner rank", byte_text(sizes.copied))
    table.add_row(f"seconds at {link_gbs:g} GB/s a rank", f"{sizes.seconds(link_gbs):.2f}")
    return table
