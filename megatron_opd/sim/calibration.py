"""Estimates costs from a recorded run, and says how well they predict what they have not seen.

The error is out of sample: costs are fitted to the run's first half, the same configuration is
simulated with them, and its throughput is compared with that of the second half. What is returned
is fitted to the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_opd.checkpoint.run_dir import RunDir
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.errors import UserError
from megatron_opd.sim.fit import LEAST_UPDATES, Fit, fit
from megatron_opd.sim.outcome import Outcome
from megatron_opd.sim.recording import UpdateSpan, read_recording
from megatron_opd.sim.world import simulate


@dataclass(frozen=True, slots=True)
class Calibration:
    """Holds costs fitted to a run, and how far a prediction from its first half is off.

    fitted: to the whole run. recorded_tokens_per_s: response tokens trained on, in the second half.
    predicted_tokens_per_s: by the costs of the first half.
    """

    fitted: Fit
    recorded_tokens_per_s: float
    predicted_tokens_per_s: float

    @property
    def error(self) -> float:
        """Returns the relative error out of sample; above 0: too fast a prediction."""
        return self.predicted_tokens_per_s / self.recorded_tokens_per_s - 1


def calibrate(run_dir: Path) -> Calibration:
    """Estimate costs from a run. UserError: it cannot be read, or is too short to be halved."""
    config = config_of(run_dir)
    try:
        recording = read_recording(run_dir)
        updates = recording.updates
        if len(updates) < 2 * LEAST_UPDATES:
            raise ValueError(
                f"{run_dir} must hold at least {2 * LEAST_UPDATES} updates, whose first half "
                f"predicts the second, got {len(updates)}; record a longer run"
            )
        half = recording.until(updates[len(updates) // 2 - 1].stop_s)
        first, whole = fit(half, config), fit(recording, config)
    except ValueError as error:
        raise UserError(f"--calibrate: {error}") from None
    later = recording.updates[len(half.updates) - 1 :]
    outcome = simulate(as_recorded(config, len(updates)), first.costs, first.lengths)
    assert outcome.tokens_per_s is not None, "as many updates were simulated"
    return Calibration(whole, tokens_per_s(later), outcome.tokens_per_s)


def as_recorded(config: Config, updates: int) -> Config:
    """Return the configuration of what was recorded: so many updates, and no simulated failure."""
    run = config.run.model_copy(update={"max_steps": updates})
    simulation = config.simulation.model_copy(update={"failures": None})
    return config.model_copy(update={"run": run, "simulation": simulation})


def config_of(run_dir: Path) -> Config:
    """Return the configuration of a recorded run. UserError: it is not there."""
    path = RunDir(run_dir).resolved_config
    if not path.is_file():
        raise UserError(f"{run_dir} is no run directory: {path.name} is not there")
    return load_config(Config, path)


def tokens_per_s(updates: tuple[UpdateSpan, ...]) -> float:
    """Return response tokens trained on in a second, from the end of the first update on."""
    seconds = updates[-1].stop_s - updates[0].stop_s
    return sum(update.response_tokens for update in updates[1:]) / seconds


def staleness_distance(outcome: Outcome, recorded: Mapping[str, int]) -> float:
    """Return the total variation between two histograms of tokens by staleness, in [0, 1].

    recorded: staleness_tokens_by_version of a run's summary.json.
    """
    one = outcome.totals.staleness.tokens.counts
    other = Counter({int(version): count for version, count in recorded.items()})
    total, total_other = one.total(), other.total()
    return 0.5 * sum(abs(one[v] / total - other[v] / total_other) for v in one | other)
