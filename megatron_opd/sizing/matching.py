"""Compares how learner and sampler compute the same model: every difference widens their gap.

Sums over ranks, experts and chunks of a sequence round differently when they are cut differently
(TIS: "larger parallelism difference, larger max gap"). Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Side:
    """Describes one row of a comparison: what both sides have. why: what a difference changes.

    cut: it is how the model is divided, which servers started elsewhere say themselves.
    """

    what: str
    learner_key: str
    learner: str
    sampler_key: str
    sampler: str
    why: str
    cut: bool = False

    @property
    def differs(self) -> bool:
        """Returns whether the two sides differ."""
        return self.learner != self.sampler

    @property
    def text(self) -> str:
        """Says in one line what differs and what it does."""
        sampler = self.sampler_key.replace("{}", self.sampler)
        return f"{self.learner_key.format(self.learner)} and {sampler}: {self.why}"


@dataclass(frozen=True, slots=True)
class Served:
    """Says how one server computes the model, by its own words."""

    tp: int
    ep: int
    dtype: str
    url: str = ""

    def key(self, name: str) -> str:
        """Returns what a row calls a setting of the server: a key, or a word of the server."""
        return f"{name}={{}} of {self.url}" if self.url else f"student.{name}={{}}"


def compared(config: Config, spec: ModelSpec, served: Served | None = None) -> list[Side]:
    """Return what learner and student servers have in common or not, in order of their effect.

    served: a server that is there; None: as the configuration has them.
    """
    learner, student, parallel = config.learner, config.student, config.learner.parallel
    served = served or Served(student.tp, student.ep, student.dtype)
    rows = [
        Side(
            "dtype",
            "learner.dtype={}",
            learner.dtype,
            served.key("dtype"),
            served.dtype,
            "the same weights are rounded differently",
        ),
        Side(
            "tensor parallel",
            "learner.parallel.tp={}",
            str(parallel.tp),
            served.key("tp"),
            str(served.tp),
            "sums over ranks are rounded differently",
            cut=True,
        ),
        Side(
            "context parallel",
            "learner.parallel.cp={}",
            str(parallel.cp),
            "servers have {}",
            "1",
            "attention is summed in parts",
        ),
    ]
    if spec.is_moe:
        rows += [
            Side(
                "expert parallel",
                "learner.parallel.ep={}",
                str(parallel.ep),
                served.key("ep"),
                str(served.ep),
                "experts' outputs are summed in another order",
                cut=True,
            ),
            Side(
                "tensor parallel of an expert",
                "learner.parallel.etp={}",
                str(parallel.expert_tp),
                f"tp / ep = {{}} of {served.url}" if served.url else "student.tp / student.ep = {}",
                str(served.tp // served.ep),
                "sums over an expert's ranks are rounded differently",
                cut=True,
            ),
        ]
    return [*rows, *_matrices(config)]


def by_layout(served: Iterable[Served]) -> dict[Served, int]:
    """Return the first server of each way to compute the model, and how many compute it so."""
    first: dict[tuple[int, int, str], Served] = {}
    count: Counter[Served] = Counter()
    for each in served:
        count[first.setdefault((each.tp, each.ep, each.dtype), each)] += 1
    return dict(count)


def _matrices(config: Config) -> list[Side]:
    """Return how the sampler holds matrices, where that is not the learner's way."""
    learner, student, rounded = config.learner, config.student, config.weight_sync.round_to
    if student.quantization is not None:
        key, shown = "student.quantization={}", student.quantization
        why = "matrices are held as one byte a number, with a scale for each row"
    elif rounded is not None:
        key, shown = "weight_sync.round_to={}", f"{rounded} values"
        why = f"matrices are only rounded: they are held in {student.dtype} and save no memory"
    else:
        return []
    return [Side("matrices", "learner.dtype={}", learner.dtype, key, shown, why)]


def differences(config: Config, spec: ModelSpec, served: Served | None = None) -> list[str]:
    """Return one line for each difference between learner and sampler.

    served: a server that is there. None: by the configuration, which does not say how servers
    started elsewhere divide the model.
    """
    unknown = served is None and bool(config.student.urls)
    rows = compared(config, spec, served)
    return [row.text for row in rows if row.differs and not (unknown and row.cut)]
