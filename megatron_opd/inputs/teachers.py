"""Runs `scoring.guard`: finds a teacher whose scores make no sense before the first update."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from megatron_opd.checkpoint.hf_formats import is_quantised
from megatron_opd.config.roles import STUDENT, Role, section_of, teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.inputs.second_pass import second_pass
from megatron_opd.metrics.teacher_health import TeacherWatch
from megatron_opd.rollout.first_scores import (
    FirstAsk,
    FirstReading,
    FirstScores,
    first_responses,
    first_scores,
)
from megatron_opd.rollout.teacher_guard import TOKENS, ProbedServer, TeacherProbe, bound_nats, probe
from sglang_bridge.errors import BadReply, one_line
from sglang_bridge.protocol import ScoreRequest
from sglang_bridge.retry import Backoff, retried
from sglang_bridge.server import options

AnswerT = TypeVar("AnswerT")

COARSE = frozenset({"quantization", "kv_cache_dtype"})
"""Settings of SGLang that round more than the dtype does."""


async def check_teachers(
    config: Config,
    prepared: Prepared,
    servers: Mapping[str, Sequence[ProbedServer]],
    *,
    second: bool = True,
    students: Sequence[ProbedServer] = (),
) -> list[str]:
    """Probe every server of every teacher, by name; returns lines for the user.

    With scoring.guard `refuse` a nonsense teacher is a UserError, with `warn` a line. second:
    compare the scores with another program's forward pass too. students: servers whose first
    responses are scored.
    """
    writes_alone = not config.estimator.reads_teacher and config.estimator.imitation is not None
    if config.scoring.guard == "off" or writes_alone:  # no score of it is read
        return []
    run = partial(
        probe,
        temperature=config.scoring.temperature,
        max_new_tokens=min(TOKENS, config.rollout.max_new_tokens),
        backoff=Backoff(config.scoring.attempts),
    )
    lines: list[str] = []
    for name, role in teacher_roles(config).items():
        vocab_size, other = prepared.vocab_sizes[role], prepared.other
        ends = prepared.ending.token_ids if other is None else prepared.ends[role].ids
        asked = [
            run(
                server,
                prepared.probes[name],
                vocab_size=vocab_size,
                end_ids=ends,
                name=f"guard-{uuid.uuid4().hex[:8]}",
            )
            for server in servers[name]
        ]
        urls = [server.url for server in servers[name]]
        found = dict(zip(urls, await _answers(role, asked), strict=True))
        lines += _verdicts(config, role, found, vocab_size)
        if second and found:
            passages = found[urls[0]].passages
            lines += await _compare(config, role, servers[name], passages)
    return lines + await _first_lines(config, prepared, servers, students)


async def _first_lines(
    config: Config,
    prepared: Prepared,
    servers: Mapping[str, Sequence[ProbedServer]],
    students: Sequence[ProbedServer],
) -> list[str]:
    """Return how teachers score the student's first responses; nothing without its servers."""
    if not students:
        return []
    name = f"first-{uuid.uuid4().hex[:8]}"
    backoff, ends = Backoff(config.scoring.attempts), prepared.ending.token_ids
    most = config.rollout.max_new_tokens
    sampled = FirstAsk(name, config.rollout.temperature, most, backoff, ends)
    scored = replace(sampled, temperature=config.scoring.temperature)
    responses = (await _answers(STUDENT, [first_responses(students, prepared.first, sampled)]))[0]
    lines: list[str] = []
    for teacher, role in teacher_roles(config).items():
        own = [each for each in responses if teacher in dict(each.prompt.shares)]
        if own and servers[teacher]:
            asked = first_scores(servers[teacher], own, scored, _first_reading(config, prepared))
            (found,) = await _answers(role, [asked])
            _check_scored(config, role, found)
            follows = config.all_teachers[teacher].source.type != "checkpoint"
            lines += found.lines(role, follows=follows)
    return lines


def _first_reading(config: Config, prepared: Prepared) -> FirstReading | None:
    alignment, other = config.scoring.alignment, prepared.other
    if alignment is None or other is None:
        return None
    return FirstReading(other.reader, alignment.unaligned)


def _check_scored(config: Config, role: str, found: FirstScores) -> None:
    """Raise UserError where no token of the first responses has a score."""
    alignment = config.scoring.alignment
    if alignment is None or found.scored_share:
        return
    tokens = sum(map(len, found.gaps))
    raise UserError(
        f"scoring.alignment.unaligned {alignment.unaligned} gives a score to some token of the "
        f"student's first responses at least, got none of {tokens} at {role}: every sample would "
        "be dropped (teacher_unaligned); use another teacher, or let the student begin with text "
        "that its tokenizer keeps"
    )


async def _answers(role: str, asked: Iterable[Awaitable[AnswerT]]) -> list[AnswerT]:
    """Await all answers. UserError: one that no guard makes useful."""
    try:
        return await asyncio.gather(*asked)
    except BadReply as error:
        raise UserError(
            f"{role} answers what no run can use: {one_line(str(error))}; check {role}.model "
            "(`opd check --data` reads every weight), and that nothing else answers there"
        ) from error


async def _compare(
    config: Config, role: str, servers: Sequence[ProbedServer], passages: Sequence[ScoreRequest]
) -> list[str]:
    """Compare every server of a role with another program's forward pass over the same weights."""
    section = section_of(config, role)
    other = await second_pass(section, passages)
    if other.by is None:
        return [f"{role}: scores compared with no other forward pass: {other.why}"]
    backoff = Backoff(config.scoring.attempts)

    async def gap_nats(server: ProbedServer) -> float:
        asked = [retried(lambda _, each=each: server.score(each), backoff) for each in passages]
        replies = await asyncio.gather(*asked)
        pairs = zip(replies, other.logp, strict=True)
        return float(np.median(np.concatenate([np.abs(r.logp_N - logp_N) for r, logp_N in pairs])))

    gaps = await _answers(role, map(gap_nats, servers))
    dtypes = {section.dtype, other.dtype}
    settings = COARSE.intersection(options.given(section.extra_args).values())
    if section.quantization is not None or settings or is_quantised(section.model):
        dtypes = {"bfloat16"}
    bound = max(bound_nats(dtype, config.scoring.temperature) for dtype in dtypes)
    lines: list[str] = []
    for server, gap in zip(servers, gaps, strict=True):
        if not gap <= bound:
            message = (
                f"{role} at {server.url} answers nonsense: its scores differ from those of "
                f"{other.by} with the weights of {role}.model by {gap:.2g} nats (median; "
                f"{bound:g} are allowed)"
            )
            if config.scoring.guard == "refuse":
                raise UserError(
                    f"{message}; check what is served, or set scoring.guard to warn or off"
                )
            lines.append(f"warning: {message}")
    if not lines:
        lines.append(f"{role}: scores agree with {other.by} to {max(gaps):.1e} nats (median)")
    return lines


def _verdicts(
    config: Config, role: str, found: Mapping[str, TeacherProbe], vocab_size: int
) -> list[str]:
    """Return a line for each bad server of a role, by url, and one for all the others."""
    lines: list[str] = []
    dtype = section_of(config, role).dtype
    problems = {url: each.problem(dtype, vocab_size) for url, each in found.items()}
    for url, problem in problems.items():
        if problem is not None:
            message = f"{role} at {url} answers nonsense: {problem}"
            if config.scoring.guard == "refuse":
                raise UserError(
                    f"{message}; check {role}.model, or set scoring.guard to warn or off"
                )
            lines.append(f"warning: {message}")
    sound = [found[url] for url, problem in problems.items() if problem is None]
    if sound:
        gap_nats = max(each.gap_nats for each in sound)
        worst_nats = max(each.worst_nats for each in sound)
        lines.append(
            f"{role}: scores agree with sampling to {gap_nats:.1e} nats "
            f"(median of {sound[0].num_ids} ids; at most {worst_nats:.1e})"
        )
    return lines


def make_teacher_watch(config: Config, vocab_sizes: Mapping[Role, int]) -> TeacherWatch | None:
    """Return what looks at the scores during the run; None where no teacher is read."""
    teachers = {name: vocab_sizes[role] for name, role in teacher_roles(config).items()}
    if not teachers or not config.estimator.reads_teacher:
        return None
    guard = config.scoring.guard
    return TeacherWatch(
        teachers,
        alarm=guard != "off",
        stop_after=config.scoring.guard_stop_after if guard == "refuse" else 0,
    )
