"""1,024 samplers at 16 sites with HeteroRL's delays, simulated at full length.

    python -m studies sites_simulator [--updates N] [--only WORD ...]

`opd simulate` on a virtual clock: the controller that ships, 16 sites of 64 student servers, GRPO
with groups of 8, batches of 512 responses of some 1,900 tokens, a learner that is about as fast as
all samplers together, so that an update takes some 28 seconds and 1800 are 64 of them. One factor
at a time from the paper's setting (log-normal delays of the weights of 60 to 1800 seconds, a window
of 64 updates): the distribution, the window, the admission, samples that are delayed too, and a
slow link. Against them: the same servers at one place, and 16 sites without delays. That last is
the control: sites are not to cost anything by themselves.

Staleness is that of samples in updates. What is not simulated: links that break, sites that leave,
compression.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.sim.costs import Costs, EngineCost, LearnerCost, LognormalLengths, SyncCost
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.world import simulate

Tree = dict[str, Any]
SITES, SERVERS, GROUP, BATCH = 16, 64, 8, 512
UPDATES = 150
TOLERANCE = 0.01
"""By how much sites without delays may differ from one place, of its tokens a second."""
COSTS = Costs(
    engine=EngineCost(step_s=0.025, prefill_token_s=3e-5, max_running=4),
    teachers={},
    learner=LearnerCost(update_s=5.0, token_s=1.6e-5),
    sync=SyncCost(sync_s=2.0, paused_s=0.0, num_bytes=3_400_000_000),
)
LENGTHS = LognormalLengths(mean=2000.0, cv=0.8, prompt_tokens=256)
PAPERS = {"type": "lognormal", "low_s": 60.0, "high_s": 1800.0}


@dataclass(frozen=True)
class Case:
    """One run. window: in updates. sites: keys of its section; None: all servers at one place."""

    window: int = 64
    admission: str = "permits"
    sites: Tree | None = field(default_factory=lambda: {"weight_delays": PAPERS})


def cases() -> dict[str, Case]:
    """Every run by name."""
    delays: dict[str, Tree] = {
        kind: {"weight_delays": PAPERS | {"type": kind}} for kind in ("weibull", "exponential")
    }
    delays["constant 1800 s"] = {"weight_delays": constant(1800.0)}
    found = {"one place": Case(sites=None), "no delays": Case(sites={})}
    for admission in ("permits", "open"):
        for window in (64, 8):
            found[f"lognormal, {admission}, window {window}"] = Case(window, admission)
        for name, sites in delays.items():
            found[f"{name}, {admission}, window 64"] = Case(64, admission, sites)
    late = {"weight_delays": PAPERS, "sample_delays": PAPERS}
    found["samples delayed too, open, window 64"] = Case(64, "open", late)
    slow = {"weight_delays": PAPERS, "link": {"bytes_per_s": 12_500_000}}
    found["100 Mbit/s, open, window 64"] = Case(64, "open", slow)
    return found


def constant(seconds: float) -> Tree:
    """A delay that is always the same."""
    return {"type": "constant", "low_s": seconds, "high_s": seconds}


def config_of(case: Case, updates: int) -> Config:
    """The configuration of a case; every server samples one response at a time."""
    near = case.sites is None
    tree: Tree = {
        "run": {"max_steps": updates},
        "data": {"train": "unused"},
        "objective": {"type": "grpo"},
        "student": {"model": "unused", "servers": SITES * SERVERS if near else SERVERS},
        "teacher": None,
        "buffer": {"batch_size": BATCH},
        "rollout": {
            "max_new_tokens": 8192,
            "concurrency": SITES * SERVERS if near else SERVERS,
            "group_size": GROUP,
        },
        "weight_sync": {"type": "disk", "directory": "unused"},
        "evaluation": {"problems": 0},
    }
    if near or case.admission == "permits":
        tree["schedule"] = {
            "max_staleness": float(case.window),
            "order": "completion",
            "max_age": case.window,
        }
    if case.sites is not None:
        members = {f"site-{i:02d}": {} for i in range(SITES)}
        tree["sites"] = case.sites | {"members": members, "admission": case.admission}
        if case.admission == "open":
            tree["sites"]["max_staleness"] = case.window
    return Config.model_validate(tree)


def measure(options: Sequence[str] = ()) -> Tree:
    """Simulate every case that was asked for; failed: the control is not within its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m studies sites_simulator")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--only", nargs="*", help="cases whose name has one of these words")
    arguments = parser.parse_args(list(options))
    chosen = {
        name: case
        for name, case in cases().items()
        if not arguments.only or any(word in name for word in arguments.only)
    }
    rows = {name: row_of(case, arguments.updates) for name, case in chosen.items()}
    found: Tree = {"samplers": SITES * SERVERS, "sites": SITES, "updates": arguments.updates}
    found |= {"tolerance": TOLERANCE, "runs": rows}
    if "one place" in rows and "no delays" in rows:
        near, far = (rows[name]["tokens_per_s"] for name in ("one place", "no delays"))
        found["control"] = round(far / near - 1, 5)
        found["failed"] = abs(far / near - 1) > TOLERANCE
    return found


def row_of(case: Case, updates: int) -> Tree:
    """Simulate one case."""
    began_s = time.process_time()
    outcome = simulate(config_of(case, updates), COSTS, LENGTHS)
    return figures(outcome) | {"cpu_s": round(time.process_time() - began_s, 1)}


def figures(outcome: Outcome) -> Tree:
    """What is told of a run."""
    stale = outcome.totals.staleness.samples
    tokens = outcome.tokens_per_s
    idle = [site.idle_ratio for site in outcome.sites.values()]
    return {
        "virtual_hours": round(outcome.wall_s / 3600, 2),
        "updates_per_hour": round(outcome.updates_per_hour, 1),
        "tokens_per_s": None if tokens is None else round(tokens),
        "learner_idle": _rounded(outcome.learner_idle_ratio),
        "samplers_idle": _rounded(outcome.rollout_idle_ratio),
        "most_idle_site": _rounded(max(idle, default=None)),
        "staleness_median": stale.quantile(0.5),
        "staleness_p95": stale.quantile(0.95),
        "staleness_max": stale.max,
        "staleness_bound": outcome.staleness_bound,
        "samples": outcome.samples,
        "dropped": dict(sorted(outcome.accounting.dropped.items())),
        "versions_a_site": sorted(site.loads for site in outcome.sites.values()),
        "cause": outcome.cause,
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
