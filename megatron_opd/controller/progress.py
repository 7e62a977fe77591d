"""Shows a run on a terminal: a live panel, or one plain line per update elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_opd.metrics.live_display import Display, Snapshot

REFRESH_PER_S = 2


class LivePanel:
    """Refreshes a panel in place, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def start(self, snapshot: Callable[[], Snapshot]) -> None:
        """Draw the panel until stopped."""
        self._live = Live(
            get_renderable=lambda: panel(snapshot()),
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
        )
        self._live.start()

    def updated(self, snapshot: Snapshot) -> None:
        """Show the figures at the next refresh."""

    def stop(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class PlainLines:
    """Prints a line per update. For files, pipes and schedulers' logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, snapshot: Callable[[], Snapshot]) -> None:
        """Print nothing before the first update."""

    def updated(self, snapshot: Snapshot) -> None:
        """Print one line, which a narrow or redirected console does not wrap."""
        self._console.print(line(snapshot), soft_wrap=True, markup=False, highlight=False)

    def stop(self) -> None:
        """Do nothing: there is nothing to clean up."""


def make_display(console: Console) -> Display:
    """Return the live panel on a terminal, plain lines elsewhere."""
    return LivePanel(console) if console.is_terminal else PlainLines(console)


def line(snapshot: Snapshot) -> str:
    """Return one update as one line of text."""
    depths = snapshot.depths
    name, figure, _ = learned(snapshot)
    return (
        f"update {snapshot.updates}/{snapshot.updates_total}"
        f"  version {snapshot.version}"
        f"  loss {_number(snapshot.loss)}"
        f"  {name} {_number(figure)}"
        f"  {_number(snapshot.tokens_per_s, 0)} tok/s"
        f"  staleness {_number(snapshot.staleness_mean, 2)} (max {_whole(snapshot.staleness_max)})"
        f"  rolling {depths.rolling} scoring {depths.scoring} buffered {depths.buffered}"
        f"  permits {depths.permits_in_use}/{depths.permits}"
        f"  dropped {snapshot.dropped}"
        f"  ETA {duration(snapshot.eta_s)}"
    )


def panel(snapshot: Snapshot) -> Group:
    """Return the live view: a bar and three rows of figures."""
    depths = snapshot.depths
    name, figure, unit = learned(snapshot)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"update {snapshot.updates}/{snapshot.updates_total}", style="bold"),
        ProgressBar(total=snapshot.updates_total, completed=snapshot.updates, width=40),
        Text(f"{duration(snapshot.elapsed_s)} elapsed, ETA {duration(snapshot.eta_s)}"),
    )
    body = Table.grid(padding=(0, 2))
    for _ in range(4):
        body.add_column(style="dim")
        body.add_column(justify="right")
    trained = {
        "version": str(snapshot.version),
        "loss": _number(snapshot.loss),
        f"{name}{unit}": _number(figure),
        "train tok/s": _number(snapshot.tokens_per_s, 0),
    }
    in_flight = {
        "rolling out": str(depths.rolling),
        "scoring": str(depths.scoring),
        "buffered": str(depths.buffered),
        "permits": f"{depths.permits_in_use}/{depths.permits}",
    }
    samples = {
        "staleness mean": _number(snapshot.staleness_mean, 2),
        "staleness max": _whole(snapshot.staleness_max),
        "dropped": str(snapshot.dropped),
    }
    for row in (trained, in_flight, samples):
        body.add_row(*chain(*row.items()))
    return Group(head, body)


def learned(snapshot: Snapshot) -> tuple[str, float | None, str]:
    """Return (name, value, unit) of what the run optimises: KL to the teacher, or the reward."""
    if snapshot.reverse_kl_nats is None and snapshot.reward_mean is not None:
        return "reward", snapshot.reward_mean, ""
    return "reverse KL", snapshot.reverse_kl_nats, " (nats)"


def duration(seconds: float | None) -> str:
    """Return `1:02:03` or `2:03`, and `-` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)
