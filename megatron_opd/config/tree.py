"""All sections of a run together, before the rules that compare sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from megatron_opd.config.corrections import CorrectionConfig
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.objectives import ObjectiveConfig, ReverseKl
from megatron_opd.config.reductions import ReductionConfig, TokenReduction
from megatron_opd.config.section import (
    Section,
)
from megatron_opd.config.sections import (
    DEFAULT_TEACHER,
    BufferConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MetricsConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    ServerConfig,
    WeightSyncConfig,
)
from megatron_opd.config.supports import SupportConfig


@dataclass(frozen=True)
class EstimatorParts:
    """The sections of a run that make its estimator."""

    support: SupportConfig | None
    objective: ObjectiveConfig
    correction: CorrectionConfig | None
    reduction: ReductionConfig


@lru_cache(maxsize=64)
def estimator_of(parts: EstimatorParts) -> Estimator:
    """Validated once, for a config's estimator is read often.

    Kept by value: one kept in the model would be stale in a copy that changes a part.
    """
    return Estimator.model_validate(vars(parts))


class ConfigTree(Section):
    """The sections of one run, each valid by itself; schema.Config is valid as a whole."""

    run: RunConfig = RunConfig()
    data: DataConfig
    student: ServerConfig
    teacher: ServerConfig | None = None
    """Not needed by objectives that only read rewards. It must have the student's tokenizer; its
    vocabulary may have padding rows that the student's lacks, not the other way round."""
    teachers: dict[str, ServerConfig] = Field(default_factory=dict[str, ServerConfig])
    """More teachers by name; data.teacher_key says which of them scores a prompt."""
    rollout: RolloutConfig = RolloutConfig()
    support: SupportConfig | None = None
    """Null: path for objectives from rewards alone, topk for sparse_reverse_kl, else mc."""
    scoring: ScoringConfig = ScoringConfig()
    buffer: BufferConfig = BufferConfig()
    objective: ObjectiveConfig = ReverseKl()
    correction: CorrectionConfig | None = None
    """Null: the importance ratio wherever the objective has one."""
    reduction: ReductionConfig = TokenReduction()
    """Left out: sequence for gspo and gepo (as published) and mixtures of nothing else, token for
    all others."""
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def estimator(self) -> Estimator:
        """The loss and the cache it needs; raises ValueError when its parts do not go together."""
        return estimator_of(
            EstimatorParts(self.support, self.objective, self.correction, self.reduction)
        )

    @property
    def all_teachers(self) -> dict[str, ServerConfig]:
        """Every teacher by name; the section `teacher` is named "teacher"."""
        default = {} if self.teacher is None else {DEFAULT_TEACHER: self.teacher}
        return default | self.teachers
