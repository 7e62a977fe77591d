"""Finds signs that a run learns nothing, or the wrong thing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from megatron_opd.metrics.hint_leak import PREFIX, leak_problem
from megatron_opd.report.facts import FEW_UPDATES, Facts, Finding
from megatron_opd.report.figures import ends
from megatron_opd.report.ranges import outside
from megatron_opd.report.series import DoubleArray

TAUGHT_NOTHING = 0.1
"""Share of the updates without a signal that is worth a change."""
TRUNCATED = 0.05
"""Share of cut responses that is worth a change."""
KL_RISE, LENGTH_RISE = 1.3, 1.5
"""Factors by which the end lies above the lowest stretch (KL), or above the begin (lengths)."""
KL_LOST = 0.2
"""Share of the divergence at the begin by which the end must lie above the lowest stretch."""
NOISE_NATS = 0.01
"""Divergence in nats a token below which a rise means nothing."""
COLLAPSED, COLLAPSE_FROM_NATS = 0.2, 0.1
"""An entropy of at least so many nats that falls below this share of itself has collapsed."""


def no_number(facts: Facts) -> Iterator[Finding]:
    """Find the first update whose loss is NaN or infinite, which rows hold as null."""
    table = facts.run.table
    if not table.has("lr"):  # a simulated run, which has no loss
        return
    loss = table.columns.get("loss", np.full(len(table), math.nan))
    first = int(np.argmax(np.isnan(loss)))
    if np.isnan(loss[first]):
        update = int(table.update_R[first])
        yield Finding(
            "bad",
            f"the loss is no number from update {update} on",
            "look at grad_norm and teacher_score_mean_nats before it; lower learner.optimizer.lr",
        )


def nothing_learnt(facts: Facts) -> Iterator[Finding]:
    """Find updates whose gradient could teach nothing (metrics/signal.py)."""
    without, updates = facts.figure("updates_without_signal"), facts.figure("updates")
    if without >= TAUGHT_NOTHING * updates and without > 1:
        yield Finding(
            "bad" if without >= 0.5 * updates else "warning",
            f"{without:.0f} of {updates:.0f} updates taught nothing",
            "all rewards of their groups were equal, or their gradient was exactly 0: choose "
            f"prompts of medium difficulty, or raise {facts.key('rollout.group_size')}",
        )


def trends(facts: Facts) -> Iterator[Finding]:
    """Compare the begin of a run, its best stretch and its end."""
    table = facts.run.table
    if len(table) < FEW_UPDATES:
        return
    kl = table.values("reverse_kl_nats")
    best, (_, last) = _lowest(kl), ends(table, "reverse_kl_nats")
    first, _ = ends(table, "reverse_kl_nats")
    if last > KL_RISE * max(best, NOISE_NATS) and last - best > KL_LOST * first:
        yield Finding(
            "warning",
            f"reverse KL rises: {last:.3g} nats a token at the end, {best:.3g} at its lowest",
            f"lower {facts.key('learner.optimizer.lr')} or {facts.key('schedule.max_staleness')}; "
            "ratio_p99 says whether the data is too old",
        )
    first, last = ends(table, "response_tokens_mean")
    if last > LENGTH_RISE * first:
        yield Finding(
            "warning",
            f"responses grow from {first:.0f} to {last:.0f} tokens",
            "look at what they repeat; a length penalty, or a lower "
            f"{facts.key('rollout.max_new_tokens')}, bounds them",
        )
    first, last = ends(table, "entropy_nats")
    if first >= COLLAPSE_FROM_NATS and last < COLLAPSED * first:
        yield Finding(
            "warning",
            f"the student's entropy fell from {first:.3g} to {last:.3g} nats a token",
            f"it may collapse: lower {facts.key('learner.optimizer.lr')}, or use an objective with "
            "forward KL (objective.type jsd)",
        )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _lowest(values: DoubleArray) -> float:
    """Return the lowest mean of any tenth of a column, NaN if it is short."""
    if len(values) < FEW_UPDATES:
        return math.nan
    width = max(4, len(values) // 10)
    sums = np.convolve(values, np.ones(width) / width, mode="valid")
    return float(sums.min())


def truncated(facts: Facts) -> Iterator[Finding]:
    """Find responses that end at the length limit, whose last part nobody saw."""
    cut, samples = facts.figure("trained_length_stops"), facts.figure("samples_consumed")
    if cut >= TRUNCATED * samples and cut > 0:
        yield Finding(
            "warning",
            f"{cut / samples:.0%} of the responses trained on were cut at the length limit",
            f"raise {facts.key('rollout.max_new_tokens')}, or look at what the student repeats",
        )


def hints(facts: Facts) -> Iterator[Finding]:
    """Find that most measurements of hints say what the terminal warns of."""
    table = facts.run.table
    if not table.has(f"{PREFIX}update"):
        return
    columns = {name: each for name, each in table.columns.items() if name.startswith(PREFIX)}
    measured = np.flatnonzero(np.isfinite(columns[f"{PREFIX}update"]))
    rows = [{name: _number(each[row]) for name, each in columns.items()} for row in measured]
    told = [problem for row in rows if (problem := leak_problem(row)) is not None]
    if 2 * len(told) > len(rows):
        yield Finding(
            "warning",
            told[-1],
            f"look at what the teacher reads ({facts.key('data.teacher_prompt_key')}), give it "
            "solutions with their working, or leave hints out",
        )


def ranges(facts: Facts) -> Iterator[Finding]:
    """Pass on which columns are out of the range that the catalogue of metrics gives."""
    for each in outside(facts.run.table) if facts.figure("updates") >= FEW_UPDATES else ():
        yield Finding("warning", each.title, each.action)
