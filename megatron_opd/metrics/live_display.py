"""Shows a run while it runs, from what its recorder has counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_opd.metrics.observers import RunObserver
from megatron_opd.metrics.recorder import RunRecorder
from megatron_opd.metrics.types import Accounting, Depths, WeightSyncReport
from megatron_opd.records.types import Batch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Describes the run at one moment for a live display.

    None: not known yet. eta_s: seconds left.
    """

    updates: int
    updates_total: int
    version: int
    loss: float | None
    reverse_kl_nats: float | None
    reward_mean: float | None
    tokens_per_s: float | None
    staleness_mean: float | None
    staleness_max: int | None
    depths: Depths
    dropped: int
    elapsed_s: float
    eta_s: float | None


class Display(Protocol):
    """Shows a run while it runs."""

    def start(self, snapshot: Callable[[], Snapshot]) -> None:
        """Begin; `snapshot` may be called at any time, from any thread."""
        ...

    def updated(self, snapshot: Snapshot) -> None:
        """Show an update whose weights are live."""
        ...

    def stop(self) -> None:
        """Stop, as the run has ended."""
        ...


class LiveDisplay(RunObserver):
    """Keeps a display up to date; observes after the recorder, whose rows it shows.

    Args:
        display: started, updated and stopped.
        recorder: counts what is shown.
        updates_total: updates the run will make.
    """

    def __init__(self, display: Display, recorder: RunRecorder, updates_total: int) -> None:
        self._display, self._recorder, self._updates_total = display, recorder, updates_total

    def started(self, now_s: float, depths: Depths) -> None:
        """Start the display."""
        self._display.start(lambda: snapshot(self._recorder, self._updates_total))

    def updated(self, batch: Batch, depths: Depths) -> None:
        """Show an update that no weight sync follows."""
        self._display.updated(snapshot(self._recorder, self._updates_total))

    def weights_synced(self, batch: Batch, report: WeightSyncReport, depths: Depths) -> None:
        """Show an update whose weights are live."""
        self._display.updated(snapshot(self._recorder, self._updates_total))

    def ended(self, accounting: Accounting, now_s: float) -> None:
        """Stop the display."""
        self._display.stop()


def snapshot(recorder: RunRecorder, updates_total: int) -> Snapshot:
    """Return the state of the run now. updates_total: updates it will make."""
    elapsed_s, shown = recorder.elapsed_s(), recorder.last_row
    left = updates_total - recorder.updates
    return Snapshot(
        updates=recorder.updates,
        updates_total=updates_total,
        version=recorder.version,
        loss=shown.get("loss"),
        reverse_kl_nats=shown.get("reverse_kl_nats"),
        reward_mean=shown.get("reward_mean"),
        tokens_per_s=shown.get("tokens_per_s"),
        staleness_mean=shown.get("staleness_mean_versions"),
        staleness_max=shown.get("staleness_max_versions"),
        depths=recorder.depths,
        dropped=recorder.totals.drops.total(),
        elapsed_s=elapsed_s,
        eta_s=elapsed_s / recorder.updates * left if recorder.updates else None,
    )
