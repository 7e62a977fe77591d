"""`scoring.guard`: a teacher that would teach nonsense is told before the first update."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.prepare import Prepared
from megatron_opd.cli.roles import section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.teacher.guard import TOKENS, Probe, ProbedServer, probe


async def check_teachers(
    config: Config, prepared: Prepared, servers: Mapping[str, Sequence[ProbedServer]]
) -> list[str]:
    """Probe every server of every teacher, by name; lines for the user.

    With scoring.guard `refuse` a nonsense teacher is a UserError, with `warn` a line.
    """
    if config.scoring.guard == "off":
        return []
    run = partial(
        probe,
        temperature=config.scoring.temperature,
        max_new_tokens=min(TOKENS, config.rollout.max_new_tokens),
        vocab_size=prepared.student.vocab_size,
    )
    asked = [
        (role, server, run(server, prepared.probes[name], name=f"guard-{uuid.uuid4().hex[:8]}"))
        for name, role in teacher_roles(config).items()
        for server in servers[name]
    ]
    probes = await asyncio.gather(*(answer for *_, answer in asked))
    return [
        _verdict(config, role, server.url, found, prepared.student.vocab_size)
        for (role, server, _), found in zip(asked, probes, strict=True)
    ]


def _verdict(config: Config, role: str, url: str, found: Probe, vocab_size: int) -> str:
    problem = found.problem(section_of(config, role).dtype, vocab_size)
    if problem is None:
        return f"{role} at {url}: {found.line()}"
    told = f"{role} at {url} answers nonsense: {problem}"
    if config.scoring.guard == "warn":
        return f"warning: {told}"
    raise UserError(f"{told}; check {role}.model, or set scoring.guard to warn or off")


def make_teacher_watch(config: Config, vocab_size: int) -> TeacherWatch | None:
    """What looks at the scores during the run; None where no teacher is read."""
    teachers = tuple(teacher_roles(config))
    if not teachers:
        return None
    guard = config.scoring.guard
    return TeacherWatch(
        teachers,
        vocab_size,
        alarm=guard != "off",
        stop_after=config.scoring.guard_stop_after if guard == "refuse" else 0,
    )
