"""Hold what an objective is used with, and derive lines of its formula from it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.config.corrections import Correction, Level
from megatron_opd.config.supports import Support
from megatron_opd.config.trust import Line


@dataclass(frozen=True)
class Use:
    """Holds the support and the correction that an objective is used with."""

    support: Support
    correction: Correction

    @property
    def level(self) -> Level:
        """Returns what one ratio of the correction is of."""
        return self.correction.ratio_level

    @property
    def on_set(self) -> bool:
        """Tell whether divergences are summed over the cached ids: nothing is random."""
        return self.support.is_set

    @property
    def on_teacher_draws(self) -> bool:
        """Tell whether the teacher chose the cached ids."""
        return self.support.owner == "teacher"

    def kappa(self, index: str) -> str:
        """Returns the factor as it stands in a formula, with a blank; "" where it is 1."""
        if self.correction.keeps_whole_ratio or not self.correction.corrects:
            return ""
        return f"kappa_{index} " if self.level == "token" else "kappa "

    def ratio_lines(self, index: str) -> list[Line]:
        """Says what r and kappa are. index: t for sampled tokens, k for cached actions."""
        over = {
            "token": f"rho_{index} = {{}}_{index} / o_{index}",
            "sequence": "rho = prod over the response's tokens of {}_t / o_t",
            "geometric": "rho = (prod over the response's tokens of {}_t / o_t)^(1/T)",
        }[self.level]
        if self.correction.keeps_whole_ratio:
            return [("ratio", f"r_{index} = p_{index} / o_{index}")]
        start = "p0" if self.correction.prox else "p"
        below = f"p0_{index}" if self.correction.prox else f"sg(p_{index})"
        ratio = ("ratio", f"r_{index} = p_{index} / {below}")
        if not self.correction.corrects:
            return [ratio]
        name = f"rho_{index}" if self.level == "token" else "rho"
        factor = f"{self.kappa(index).rstrip()} = {self.correction.text(name)}"
        return [ratio, ("correction", f"{factor}; {over.format(start)}")]
