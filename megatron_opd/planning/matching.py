"""Compares how learner and sampler compute the same model: every difference widens their gap.

Sums over ranks, experts and chunks of a sequence round differently when they are cut differently
(TIS: "larger parallelism difference, larger max gap"). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Side:
    """Describes one row of a comparison: what both sides have. why: what a difference changes."""

    what: str
    learner_key: str
    learner: str
    sampler_key: str
    sampler: str
    why: str

    @property
    def differs(self) -> bool:
        """Returns whether the two sides differ."""
        return self.learner != self.sampler

    @property
    def text(self) -> str:
        """Says in one line what differs and what it does."""
        sampler = self.sampler_key.format(self.sampler)
        return f"{self.learner_key.format(self.learner)} and {sampler}: {self.why}"


def compared(config: Config, spec: ModelSpec) -> list[Side]:
    """Return what learner and student servers have in common or not, in order of their effect."""
    learner, student, parallel = config.learner, config.student, config.learner.parallel
    rows = [
        Side(
            "dtype",
            "learner.dtype={}",
            learner.dtype,
            "student.dtype={}",
            student.dtype,
            "the same weights are rounded differently",
        ),
        Side(
            "tensor parallel",
            "learner.parallel.tp={}",
            str(parallel.tp),
            "student.tp={}",
            str(student.tp),
            "sums over ranks are rounded differently",
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
                "student.ep={}",
                str(student.ep),
                "experts' outputs are summed in another order",
            ),
            Side(
                "tensor parallel of an expert",
                "learner.parallel.etp={}",
                str(parallel.expert_tp),
                "student.tp / student.ep = {}",
                str(student.tp // student.ep),
                "sums over an expert's ranks are rounded differently",
            ),
        ]
    return [*rows, *_matrices(config)]


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


def differences(config: Config, spec: ModelSpec) -> list[str]:
    """Return one line for each difference between learner and sampler."""
    return [row.text for row in compared(config, spec) if row.differs]
