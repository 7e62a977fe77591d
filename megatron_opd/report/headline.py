"""Chooses the figures at the top of the report, and writes them as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_opd.report.figures import run_figures
from megatron_opd.report.quantities import duration, percent, plain, size
from megatron_opd.report.run_data import RunData

UNKNOWN = "-"
"""Shown for a figure that a run does not have."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Holds one figure of one run as text. rest: what belongs to it and matters less."""

    value: str
    rest: str = ""

    def __str__(self) -> str:
        """Return both on one line."""
        return f"{self.value} ({self.rest})" if self.rest else self.value


@dataclass(frozen=True, slots=True)
class Headline:
    """Holds one figure of all runs. hint: what it is; empty where the label says it."""

    label: str
    cells: tuple[Cell, ...]
    hint: str = ""


Figures = Mapping[str, float]
Writer = Callable[[Figures], str | Cell]
"""Writes a figure of a run. KeyError: the run does not have it."""


def headlines_of(runs: Sequence[RunData]) -> tuple[Headline, ...]:
    """Return the figures that at least one run has."""
    figures = [with_settings(run) for run in runs]
    found: list[Headline] = []
    for label, hint, write in HEADLINES:
        cells = tuple(_cell(write, each) for each in figures)
        if any(cell.value != UNKNOWN for cell in cells):
            found.append(Headline(label, cells, hint))
    return tuple(found)


def with_settings(run: RunData) -> Figures:
    """Return a run's figures, and of its configuration what they are compared with."""
    found = run_figures(run)
    for name, key in (("updates_asked", "run.max_steps"),):
        text = run.setting(key)
        if text is not None and text.isdecimal():
            found[name] = float(text)
    return found


def _cell(write: Writer, figures: Figures) -> Cell:
    try:
        written = write(figures)
    except KeyError:
        return Cell(UNKNOWN)
    return written if isinstance(written, Cell) else Cell(written)


def _updates(f: Figures) -> str:
    asked = f.get("updates_asked")
    return plain(f["updates"]) if asked is None else f"{plain(f['updates'])} of {plain(asked)}"


def _accuracy(f: Figures) -> str:
    return f"{f['student_accuracy_before_pct']:.1f} % to {f['student_accuracy_after_pct']:.1f} %"


def _gap_closed(f: Figures) -> str:
    before, after = f["student_accuracy_before_pct"], f["student_accuracy_after_pct"]
    gap = f["teacher_accuracy_pct"] - before
    return percent((after - before) / gap) if gap > 0 else UNKNOWN


def _staleness(f: Figures) -> Cell:
    bound = f.get("staleness_bound_versions")
    limit = "" if bound is None else f", bound {plain(bound)}"
    largest = plain(f["staleness_max_versions"])
    return Cell(plain(f["staleness_mean_versions"]), f"largest {largest}{limit}")


def _idle(name: str, of_windows: str) -> Writer:
    """Write a share of the summary, or while there is none the mean over the windows."""
    return lambda f: percent(f[name] if name in f else f[of_windows])


def _ends(column: str) -> Writer:
    return lambda f: f"{plain(f[f'{column}_begin'])} to {plain(f[f'{column}_end'])}"


def _mismatch(f: Figures) -> Cell:
    return Cell(plain(f["probs_diff_mean"], 2), f"largest {plain(f['probs_diff_max'], 2)}")


def _sync(f: Figures) -> Cell:
    pause = f.get("pause_s_mean")
    return Cell(
        duration(f["publish_s_mean"]), "" if pause is None else f"{duration(pause)} of it a pause"
    )


def _cache(f: Figures) -> Cell:
    ids, number = f["distinct_ids_per_token"], f["cache_bytes_per_token"]
    return Cell(f"{plain(round(number))} bytes a token", f"{plain(ids)} distinct ids")


def _samples(f: Figures) -> Cell:
    dropped = f.get("dropped_samples", 0.0)
    return Cell(plain(f["samples_consumed"]), f"{plain(dropped)} dropped")


def _length(f: Figures) -> str:
    return f"{plain(f['trained_tokens_mean'])} tokens"


def _cut(f: Figures) -> str:
    return percent(f["trained_length_stops"] / f["samples_consumed"])


def _time(f: Figures) -> str:
    return duration(f["wall_s"] if "wall_s" in f else f["elapsed_s"])


def _speed(f: Figures) -> str:
    return f"{plain(f['train_tokens_per_s'])} tokens/s"


HEADLINES: tuple[tuple[str, str, Writer], ...] = (
    ("Accuracy on held-out problems", "before and after the run", _accuracy),
    ("Accuracy of the teacher", "", lambda f: f"{f['teacher_accuracy_pct']:.1f} %"),
    ("Gap to the teacher closed", "", _gap_closed),
    ("Reverse KL", "first and last 5 % of the updates, nats a token", _ends("reverse_kl_nats")),
    ("Loss", "first and last 5 % of the updates", _ends("loss")),
    ("Reward", "first and last 5 % of the updates", _ends("reward_mean")),
    ("Updates", "", _updates),
    ("Time", "with start and evaluations, where the run has ended", _time),
    ("Throughput", "response tokens trained on, after 5 updates", _speed),
    (
        *("Learner idle", "share of the time in which it neither trains nor sends weights"),
        _idle("learner_idle_ratio", "window_learner_idle"),
    ),
    (
        *(
            "Servers idle",
            "share of the time in which the average one is idle or paused",
        ),
        _idle("fleet_idle_ratio", "window_sampler_idle"),
    ),
    ("Overlap", "stages that work at once, on average, of 3", lambda f: plain(f["overlap"])),
    ("Staleness", "age of the tokens trained on, in versions", _staleness),
    ("Mismatch", "|p_learner - p_sampler|, mean over tokens", _mismatch),
    ("Importance ratio", "largest 99th percentile of an update", lambda f: plain(f["ratio_p99"])),
    ("Samples trained on", "", _samples),
    ("Response length", "mean of the responses trained on", _length),
    ("Cut at the length limit", "share of the responses trained on", _cut),
    ("Weight sync", "mean time", _sync),
    ("Draw cache", "", _cache),
    (
        "Peak memory",
        "of the controller and all that it started",
        lambda f: size(f["peak_rss_bytes"]),
    ),
)
"""Label, hint and text of every figure, in the order of the page."""
