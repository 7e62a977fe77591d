"""Reads what a simulation is given: costs and lengths."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.config.roles import teacher_roles
from megatron_opd.config.schema import Config
from megatron_opd.config.simulation import DEFAULT_GPU
from megatron_opd.errors import UserError, checked
from megatron_opd.inputs.models import read_models
from megatron_opd.sim.costs import Costs, Lengths, read_costs
from megatron_opd.sim.drawn_lengths import drawn_lengths
from megatron_opd.sim.hardware import default_costs
from megatron_opd.sim.recording import read_recording
from megatron_opd.sizing.served import Sized


def check_trajectories(config: Config) -> None:
    """Check that it is known how many sequences a trajectory has. Raises UserError."""
    if config.environment is not None and config.environment.history != "append":
        raise UserError(
            "environment.history must be append for a prediction, which does not know how often a "
            f"chat template rewrites a history, got {config.environment.history}; add --set "
            "environment.history=append"
        )


def check_sources(config: Config) -> list[str]:
    """Check that every teacher has servers; returns lines on what is not predicted. UserError."""
    lines: list[str] = []
    if config.estimator.imitation is not None:
        raise UserError(
            "objective.type must not be sft_on_teacher for a prediction, which knows no teachers "
            f"that write answers, got {config.objective.type}; leave that term out"
        )
    for name, role in teacher_roles(config).items():
        source = config.all_teachers[name].source
        if source.student_share is not None:
            raise UserError(
                f"{role}.source.share must be null for a prediction, which knows no servers that "
                f"sample and score, got {source.student_share:g}; leave it out"
            )
        if source.follows:
            lines.append(f"note: {role}.source: weight syncs of teachers are not predicted")
    return lines


def costs_of(config: Config, costs_file: Path | None = None) -> Costs:
    """Return the costs of a configuration: of a file, else what its GPU predicts. UserError."""
    path = costs_file or config.simulation.costs
    if path is not None:
        return checked(lambda: read_costs(path))
    models = read_models(config)
    teachers: dict[str, Sized] = {
        name: models.teachers[role].size for name, role in teacher_roles(config).items()
    }
    gpu = config.simulation.gpu or DEFAULT_GPU
    return checked(lambda: default_costs(config, models.student.spec, teachers, gpu))


def lengths_of(config: Config) -> Lengths:
    """Return the lengths of config.simulation.lengths. UserError: they cannot be read."""
    recorded = config.simulation.lengths.recorded
    if recorded is None:
        return drawn_lengths(config)
    return checked(lambda: read_recording(recorded).lengths)
