"""Finds what went wrong with a run as a whole: how it ended, whether it hangs, what it lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_opd.records.drops import DROPS
from megatron_opd.report.facts import FEW_UPDATES, Facts, Finding

DROPPED = 0.01
"""Share of the samples trained on from which drops are worth a look."""
SILENT_UPDATES, SILENT_S = 10, 300.0
"""A run is silent when it wrote nothing for as long as so many updates take, and for this time."""
SLOW_SERVER = 0.5
"""Share of the median server's tokens below which a server is slow."""
RESUME = (
    "the ends of the logs are below; opd run CONFIG.yaml --resume continues from the newest "
    "checkpoint"
)


def ended(facts: Facts) -> Iterator[Finding]:
    """Say how the run ended, if not as it should."""
    state, why = facts.run.state.state, facts.run.state.why
    match state:
        case "failed":
            yield Finding("bad", f"the run failed: {why or 'no cause is recorded'}", RESUME)
        case "crashed":
            yield Finding("bad", f"the run ended without a summary: {why}", RESUME)
        case "interrupted" | "preempted":
            yield Finding("warning", f"the run was {state}{': ' if why else ''}{why}", RESUME)
        case _:
            return


def silent(facts: Facts) -> Iterator[Finding]:
    """Find a run that should write and does not."""
    run = facts.run
    if run.state.state != "running" or run.written_s is None or len(run.table) < 2:
        return
    silent_s = facts.now_s - run.written_s
    usual_s = float(np.median(np.diff(run.table.time_s_R)))
    if silent_s > max(SILENT_S, SILENT_UPDATES * usual_s):
        yield Finding(
            "warning",
            f"nothing was written for {silent_s / 60:.0f} minutes; an update takes {usual_s:.1f} s",
            "look at the logs: a server or a collective may hang (learner.timeout_s ends the wait)",
        )


def dropped(facts: Facts) -> Iterator[Finding]:
    """Find samples that were sampled for nothing."""
    dropped, samples = facts.figure("dropped_samples"), facts.figure("samples_consumed")
    if dropped > 0 and dropped >= DROPPED * samples:
        summary = facts.run.summary or {}
        by_word = summary.get("samples_dropped")
        words = list(map(str, by_word)) if isinstance(by_word, dict) else []
        remedies = [f"{word}: {DROPS[word].remedy}" for word in words if word in DROPS]
        yield Finding(
            "warning",
            f"{dropped:.0f} samples were dropped" + (f" ({', '.join(words)})" if words else ""),
            "; ".join(remedies) or "the first of each reason is in the terminal's output",
        )


def servers(facts: Facts) -> Iterator[Finding]:
    """Find servers that were lost, or are slower than the others."""
    summary = facts.run.summary or {}
    lost = summary.get("servers_lost")
    if isinstance(lost, dict) and lost:
        yield Finding(
            "warning",
            f"{len(lost)} servers were lost and did not come back: {', '.join(map(str, lost))}",
            "their logs say why; opd fleet add puts others in their place",
        )
    tokens = np.array([each.tokens for each in facts.run.servers if each.version is not None])
    if len(tokens) > 1 and facts.figure("updates") >= FEW_UPDATES:
        usual = float(np.median(tokens))
        slow = int((tokens < SLOW_SERVER * usual).sum())
        if slow:
            yield Finding(
                "warning",
                f"{slow} of {len(tokens)} student servers sampled less than half of the usual "
                f"{usual:,.0f} tokens",
                "they joined late, or their machines are slower: see the servers below",
            )


def files(facts: Facts) -> Iterator[Finding]:
    """Say how many lines are missing from everything that is shown."""
    if facts.run.damaged:
        yield Finding(
            "warning",
            f"{facts.run.damaged} lines of the run's files could not be read and are left out",
            "a full disk or a killed writer leaves such lines",
        )
