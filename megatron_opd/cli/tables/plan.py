"""Prints what `opd plan` found: the front, why the others lost, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from megatron_opd.output import new_table
from megatron_opd.sim.planner.candidates import Candidate
from megatron_opd.sim.planner.quick import STAGES
from megatron_opd.sim.planner.result import Plan, throughput
from megatron_opd.sim.planner.search import Trial
from megatron_opd.sizing.gpus import ASSUMED

ORDER = ("student", "teacher", "learner")
SPENT = ("compute", "memory", "NVLink", "network", "overhead")
NAMES = {"learner": "learner", "student": "student servers", "teacher": "teacher servers"}


def plan_report(plan: Plan) -> Iterator[Table | str]:
    """Yield what is printed, in order."""
    yield front_table(plan)
    yield phases_table(plan)
    yield losers_table(plan)
    found = plan.found
    yield (
        f"{found.enumerated:,} candidates: {found.pruned:,} left out by their bounds, "
        f"{len(found.trials)} simulated, in {plan.took_s:.0f} s"
    )
    for bound, least_s in sorted(found.unproven_s.items()):
        yield (
            f"staleness {bound}: stopped by --trials; no other candidate makes more than "
            f"{plan.demand.tokens / least_s:,.0f} tokens/s"
        )
    yield from (f"assumed: {line}" for line in assumptions(plan))


def front_table(plan: Plan) -> Table:
    """Return the fastest split of each bound on staleness that less staleness does not reach."""
    columns = (
        "stale",
        "tokens/s",
        "schedule",
        "student",
        "teacher",
        "learner",
        "rollouts",
        "busy %",
    )
    title = f"{plan.task.gpus} x {plan.gpu}: throughput against staleness"
    table = new_table(title, columns, 0)
    for column in table.columns:
        column.no_wrap = True
    for trial in plan.found.front:
        each, busy = trial.candidate, trial.measured.busy
        table.add_row(
            str(each.schedule.bound),
            f"{throughput(trial, plan.demand):,.0f}",
            schedule_text(each),
            f"{each.servers} x {each.student.tp}",
            "-" if each.teacher is None else f"{each.teachers} x {each.teacher.tp}",
            layout_text(each),
            str(each.concurrency),
            "/".join(f"{100 * busy[stage]:.0f}" if stage in busy else "-" for stage in ORDER),
        )
    table.caption = (
        "stale: bound in updates; student, teacher: servers x tp; learner: GPUs: layout\n"
        "busy: student/teacher/learner, of the time; the last row is the plan"
    )
    return table


def phases_table(plan: Plan) -> Table:
    """Return what each phase of the plan takes on a GPU that works in it, and what rules it."""
    columns = ("phase", "ms", *SPENT, "ruled by")
    table = new_table("phases of the plan, in milliseconds of a GPU", columns)
    for name, phase in plan.phases.items():
        time = phase.time
        spent = (f"{1000 * time.terms[term]:,.1f}" for term in SPENT)
        table.add_row(name, f"{1000 * time.seconds:,.1f}", *spent, time.ruled_by)
    table.caption = "arithmetic and memory traffic overlap, all else comes on top"
    return table


def schedule_text(candidate: Candidate) -> str:
    """Return a schedule in a few words."""
    config = candidate.schedule.config
    every = f" every {config.sync_every}" if config.sync_every > 1 else ""
    ahead = f" {config.max_staleness:g}" if config.max_staleness else ""
    return f"{config.type}{ahead}{every}"


def layout_text(candidate: Candidate) -> str:
    """Return the learner's GPUs and layout."""
    parallel = candidate.learner.parallel
    sizes = (
        f"{name}{getattr(parallel, name)}"
        for name in ("tp", "cp", "pp", "dp", "ep")
        if getattr(parallel, name) > 1
    )
    return f"{parallel.world_size}: {' '.join(sizes) or 'dp1'}"


def losers_table(plan: Plan) -> Table:
    """Return why each class of other candidates lost."""
    table = new_table("why the others lose", ("class", "number", "reason"), 3)
    table.columns[1].justify = "right"
    found, losers = plan.found, plan.losers
    for kind, number in losers.counts.items():
        table.add_row(kind, f"{number:,}", losers.reasons[kind])
    front = {id(trial) for trial in found.front}
    for stage in STAGES:
        left_out = found.limited[stage] - found.simulated_of[stage]
        if left_out > 0:
            reason = "by their bounds no faster than what was simulated"
            if found.unproven_s:
                reason += ", or left by --trials"
            table.add_row(f"{stage}-bound, left out", f"{left_out:,}", reason)
        tried = [
            trial for trial in found.trials if id(trial) not in front and limits(trial) == stage
        ]
        if tried:
            best = min(tried, key=lambda trial: trial.measured.seconds)
            table.add_row(f"{stage}-bound", f"{len(tried):,}", loss_text(best, plan))
    return table


def limits(trial: Trial) -> str:
    """Return the stage that works most."""
    busy = trial.measured.busy
    return max(busy, key=busy.__getitem__)


def loss_text(trial: Trial, plan: Plan) -> str:
    """Return why the best of a class loses."""
    busy, stage, each = trial.measured.busy, limits(trial), trial.candidate
    idle = ", ".join(
        f"{NAMES[other]} {1 - share:.0%} idle" for other, share in busy.items() if other != stage
    )
    return (
        f"best {throughput(trial, plan.demand):,.0f} tokens/s at staleness {each.schedule.bound} "
        f"({schedule_text(each)}, {' : '.join(map(str, each.gpus))}): {NAMES[stage]} "
        f"{busy[stage]:.0%} busy, {idle}"
    )


def assumptions(plan: Plan) -> Iterator[str]:
    """Yield what the figures depend on besides the configuration."""
    window, task = plan.demand.window, plan.task
    yield (
        f"costs predicted from the data sheet of {plan.gpu} ({task.memory_gib:g} GiB each, nodes "
        f"of {task.node}), not measured; see docs/roofline.md"
    )
    yield (
        f"of the data sheet, servers reach {ASSUMED.decode_mfu:.0%} of the peak, the learner "
        f"{ASSUMED.train_mfu:.0%}, memory {ASSUMED.hbm:.0%}, links {ASSUMED.link:.0%} "
        "(megatron_opd/sizing/gpus.py)"
    )
    response = plan.demand.response_N
    given, what = plan.demand.prompt_N.mean(), "responses"
    if plan.demand.plays:
        asked, what = plan.demand.requests, "trajectories"
        yield (
            f"trajectories of {asked.per_sample:.1f} turns on average, which environments answer "
            f"in {asked.answer_s_R.mean():.3g} s each (simulation.turns), as many at once as asked"
        )
    yield (
        f"{what} of {response.mean():,.0f} sampled tokens on average, {response.max():,} at most, "
        f"and {given:,.0f} given ones (simulation.lengths); no failures"
    )
    yield f"tokens/s between updates {window.first} and {window.last} of the same simulated samples"
