"""Joins all sections of a run, before the rules that compare sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from megatron_opd.config.cluster import ClusterConfig, SecurityConfig, WorkersConfig
from megatron_opd.config.corrections import CorrectionConfig
from megatron_opd.config.environment import EnvironmentConfig, UserConfig
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.evaluation import EvaluationConfig, SetSettings, settings_of
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.metrics import MetricsConfig
from megatron_opd.config.objective import Credit
from megatron_opd.config.objectives import ObjectiveConfig, ReverseKl
from megatron_opd.config.reductions import ReductionConfig, TokenReduction
from megatron_opd.config.schedule import ScheduleConfig
from megatron_opd.config.section import Section
from megatron_opd.config.sections import (
    DEFAULT_TEACHER,
    BufferConfig,
    CheckpointConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    WeightSyncConfig,
)
from megatron_opd.config.selection import SelectionConfig
from megatron_opd.config.servers import ServerConfig
from megatron_opd.config.simulation import SimulationConfig
from megatron_opd.config.sites import SitesConfig, open_permits
from megatron_opd.config.supports import SupportConfig
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.config.verifier import VerifierConfig


@dataclass(frozen=True)
class EstimatorParts:
    """Holds the sections of a run that make its estimator."""

    support: SupportConfig | None
    objective: ObjectiveConfig
    correction: CorrectionConfig | None
    reduction: ReductionConfig
    credit: Credit


@lru_cache(maxsize=64)
def estimator_of(parts: EstimatorParts) -> Estimator:
    """Build the estimator once for equal parts, since a config's estimator is read often.

    Kept by value: one kept in the model would be stale in a copy that changes a part.
    """
    return Estimator.model_validate(vars(parts))


class ConfigTree(Section):
    """Holds the sections of one run, each valid by itself; schema.Config is valid as a whole."""

    run: RunConfig = RunConfig()
    """Where the run writes, how long it is and its seed."""
    data: DataConfig
    """The prompt files and how their rows are read."""
    student: ServerConfig
    """The student's model and the servers that sample from it."""
    teacher: TeacherConfig | None = None
    """The default teacher's servers; null for objectives that only read rewards. It must have the
    student's tokenizer (another: scoring.alignment), but may have more tokens behind the student's
    unless it selects ids itself (support.type teacher_topk, teacher_mc); either may have more
    padding rows in its vocabulary: ids that only the student has then get probability 0."""
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict[str, TeacherConfig])
    """More teachers by name, each with the keys of `teacher`; data.teacher_key says which of them
    scores a prompt, or scoring.mixture how they score it together. Each one adds its servers'
    memory."""
    verifier: VerifierConfig = VerifierConfig()
    """How the verifiers that data.task names are run: worker processes and limits."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled from the student."""
    environment: EnvironmentConfig | None = None
    """Whom the student speaks with, turn by turn: tools, a game, or a class of your own. null: each
    prompt is answered once."""
    support: SupportConfig | None = None
    """Token ids per position that the loss compares. Null: path for objectives that use rewards
    alone, topk for sparse_reverse_kl, otherwise mc."""
    scoring: ScoringConfig = ScoringConfig()
    """How teachers are asked for scores, and guarded."""
    selection: SelectionConfig = SelectionConfig()
    """Which of the sampled responses are trained on."""
    buffer: BufferConfig = BufferConfig()
    """How many samples an update is made of."""
    schedule: ScheduleConfig = ScheduleConfig()
    """When samples are taken and weights are synced, and how stale samples may be."""
    objective: ObjectiveConfig = ReverseKl()
    """The loss that the learner minimises; its `type` names the formula."""
    correction: CorrectionConfig | None = None
    """Correction for the gap between learner and sampler. Null: truncated at 2 with prox where the
    run learns from rewards, where the sampler's weights are quantised or rounded, and for a mixture
    of experts in bfloat16; otherwise, and with gepo, the whole ratio (importance). `opd check` says
    which and why."""
    reduction: ReductionConfig = TokenReduction()
    """Weighting of tokens and samples in the loss. Left out: sequence_mean for gspo and
    gepo (as published) and for mixtures of only these, token_mean for all others."""
    learner: LearnerConfig = LearnerConfig()
    """The Megatron-Core learner, its parallel layout and its optimizer."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights reach the student's servers."""
    cluster: ClusterConfig = ClusterConfig()
    """How the processes of a run share machines."""
    workers: WorkersConfig = WorkersConfig()
    """How many processes move samples between servers and learner."""
    sites: SitesConfig = SitesConfig()
    """Sampler sites that are far from the learner; none: student servers are part of the run."""
    security: SecurityConfig = SecurityConfig()
    """What a run may do without keys."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What is measured on held-out problems, and when."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Which checkpoints are written and kept."""
    metrics: MetricsConfig = MetricsConfig()
    """What is recorded and shown besides the two metrics files."""
    simulation: SimulationConfig = SimulationConfig()
    """What `opd simulate` assumes of hardware, lengths and failures; `opd run` ignores it."""

    @property
    def estimator(self) -> Estimator:
        """Returns the loss and the cache it needs.

        Raises ValueError when its parts do not go together.
        """
        credit = "trajectory" if self.environment is None else self.environment.credit
        return estimator_of(
            EstimatorParts(self.support, self.objective, self.correction, self.reduction, credit)
        )

    @property
    def all_teachers(self) -> dict[str, TeacherConfig]:
        """Returns every teacher by name; the section `teacher` is named "teacher"."""
        default = {} if self.teacher is None else {DEFAULT_TEACHER: self.teacher}
        return default | self.teachers

    @property
    def user_teacher(self) -> str | None:
        """Returns the name of the teacher that plays the user, None where none does."""
        if not isinstance(self.environment, UserConfig):
            return None
        return self.environment.teacher or next(iter(self.all_teachers), None)

    @property
    def served(self) -> dict[str, ServerConfig]:
        """Returns the sections of servers by key: student, teacher, teachers.NAME."""
        teachers = {
            key_of_teacher(name): section
            for name, section in self.all_teachers.items()
            if section.source.student_share is None
        }
        return {"student": self.student, **teachers}

    @property
    def site_slots(self) -> dict[str, int]:
        """Returns how many prompts each sampler site holds at once."""
        default = self.rollout.concurrency
        return {
            name: default if site.concurrency is None else site.concurrency
            for name, site in self.sites.members.items()
        }

    @property
    def staleness_bound(self) -> int:
        """Returns the bound on the staleness of a token that is trained on, in updates."""
        if self.sites.is_open:
            return self.sites.max_staleness
        return self.schedule.bound(self.buffer.batch_size)

    @property
    def permits(self) -> int:
        """Returns how many prompts may be between their admission and the version they led to."""
        batch_size = self.buffer.batch_size
        if not self.sites.is_open:
            return self.schedule.permits(batch_size)
        slots, group = sum(self.site_slots.values()), self.rollout.group_size
        window, every = self.sites.max_staleness, self.schedule.sync_every
        return open_permits(batch_size, group, slots, window, every)

    @property
    def heldout(self) -> dict[str, SetSettings]:
        """Returns how each set of data.heldout is evaluated, by name; none where nothing is."""
        evaluation, limit = self.evaluation, self.rollout.max_new_tokens
        if not evaluation.problems:
            return {}
        sets = self.data.heldout.items()
        return {name: settings_of(each, evaluation, limit) for name, each in sets}

    @property
    def best_set(self) -> SetSettings | None:
        """Returns the set that says which weights are best, or None without any."""
        found = self.heldout
        name = self.evaluation.best_set
        return next(iter(found.values()), None) if name is None else found.get(name)


def key_of_teacher(name: str) -> str:
    """Return the section's key: `teacher`, or `teachers.NAME`."""
    return name if name == DEFAULT_TEACHER else f"teachers.{name}"
