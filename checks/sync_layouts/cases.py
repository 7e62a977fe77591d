"""Which layouts meet: every pair of two factors' values at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.case_rows import fingerprint_of
from harness.tiny_models import MODELS

Tree = dict[str, Any]
LEARNERS: Mapping[str, Tree] = {
    "1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
}
FLEETS: Mapping[str, Tree] = {"tp1": {}, "tp2": {"tp": 2}, "tp2_ep2": {"tp": 2, "ep": 2}}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One row: a learner sends its weights to servers that hold other ones."""

    learner: str
    fleet: str
    servers: int
    model: str
    dtype: str
    staging: bool
    relay: bool

    @property
    def name(self) -> str:
        """Names its row."""
        how = ("-staged" if self.staging else "") + ("-relay" if self.relay else "")
        return f"{self.model}-{self.learner}-to-{self.servers}x{self.fleet}-{self.dtype}{how}"

    @property
    def is_possible(self) -> bool:
        """Whether experts are split where there are some, and who relays has a second server."""
        has_experts = self.model == "moe" or "ep2" not in self.learner + self.fleet
        return has_experts and (self.servers > 1 or not self.relay)

    def fingerprint(self) -> str:
        """Changes with the project's code, this check's, and what is asked."""
        asked = [asdict(self), LEARNERS[self.learner], FLEETS[self.fleet], MODELS[self.model]]
        return fingerprint_of(asked, "checks/sync_layouts")


def all_cases() -> list[Case]:
    """Few cases in which every possible pair of two factors' values is met, by greedy choice."""
    possible = [
        case
        for values in itertools.product(
            LEARNERS, FLEETS, (1, 2), MODELS, DTYPES, (False, True), (False, True)
        )
        if (case := Case(*values)).is_possible
    ]
    missing = {pair for case in possible for pair in pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(possible, key=lambda case: len(missing & set(pairs(case))))
        chosen.append(best)
        missing -= set(pairs(best))
    return chosen


def pairs(case: Case) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Any two factors with their values."""
    return itertools.combinations(asdict(case).items(), 2)
