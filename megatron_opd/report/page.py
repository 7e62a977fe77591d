"""Writes the report: one HTML file that needs no network and runs no script but its own.

Everything that is words stands in the HTML, readable without scripts; the scripts draw curves and
time lines from one JSON object. A Content-Security-Policy names the hash of each script and style.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.resources import files

from megatron_opd.report.config_diff import settings_of
from megatron_opd.report.failures import failures_of
from megatron_opd.report.findings import findings_of
from megatron_opd.report.headline import headlines_of
from megatron_opd.report.markup import escaped, folded, json_for_script, policy, table
from megatron_opd.report.page_data import page_data
from megatron_opd.report.quantities import plain, size
from megatron_opd.report.run_data import RunData
from megatron_opd.report.run_files import LogFile

SCRIPTS = ("uplot/uPlot.iife.min.js", "text.js", "curves.js", "lanes.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "page.css")
MOST_LOGS = 20
"""Logs of a run whose ends are shown, the learner's and the controller's first."""
FIRST_LOGS = ("controller.log", "learner.log")


def static(name: str) -> str:
    """Return a file that ships with this package, as text."""
    return files("megatron_opd.report").joinpath("static", *name.split("/")).read_text("utf-8")


_LINKS = "<p>" + " ".join(
    f'<a href="#{name}">{title}</a>'
    for name, title in (
        ("figures", "Figures"),
        ("curves", "Curves"),
        ("timeline", "Time line"),
        ("failures", "Failures"),
        ("settings", "Configuration"),
    )
) + "</p>"  # fmt: skip


def page(runs: Sequence[RunData], now_s: float | None = None) -> str:
    """Return the whole report of some runs. now_s: seconds since 1970, when they were read."""
    now_s = time.time() if now_s is None else now_s
    scripts, styles = [static(name) for name in SCRIPTS], [static(name) for name in STYLES]
    title = f"opd report: {', '.join(run.name for run in runs)}"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    body = "".join(
        (
            _head(runs, when),
            _section("findings", "What to look at", _findings(runs, now_s)),
            _section("figures", "Figures", _figures(runs)),
            '<div id="curves"></div>',
            _section("timeline", "Time line", '<div id="lanes"></div>' + _no_timeline(runs)),
            _section("failures", "Failures and restarts", _failures(runs)),
            _section("servers", "Student servers", _servers(runs)),
            _section("settings", "Configuration", _settings(runs)),
            _section("logs", "Logs", _logs(runs)),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy(scripts, styles))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title>"
        + "".join(f"<style>{style}</style>" for style in styles)
        + f"</head><body>{body}"
        + f'<script type="application/json" id="data">{json_for_script(page_data(runs))}</script>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def _section(name: str, title: str, inside: str) -> str:
    if not inside:
        return ""
    return f'<section id="{name}"><h2>{escaped(title)}</h2>{inside}</section>'


def _head(runs: Sequence[RunData], when: str) -> str:
    chips = "".join(
        f'<button class="run" data-run="{index}" aria-pressed="true">'
        f'<i class="c{index % 8}"></i>{escaped(run.name)}'
        f'<b class="state {escaped(run.state.state)}">{escaped(_state(run))}</b></button>'
        for index, run in enumerate(runs)
    )
    return (
        f"<header><h1>{'Run report' if len(runs) == 1 else 'Runs side by side'}</h1>"
        f"<p>Read {escaped(when)}</p>{_LINKS}</header>"
        f'<nav><div class="runs">{chips}</div><div id="controls"></div></nav>'
        "<noscript><p>Curves and time lines need JavaScript; all else is here.</p></noscript>"
    )


def _state(run: RunData) -> str:
    return f"{run.state.state}, simulated" if run.simulated else run.state.state


def _per_run(runs: Sequence[RunData], parts: Sequence[str]) -> str:
    """Put the parts of several runs under their names; runs without one are left out."""
    if len(runs) == 1:
        return parts[0]
    found = zip(runs, parts, strict=True)
    return "".join(f"<h3>{escaped(run.name)}</h3>{part}" for run, part in found if part)


def _findings(runs: Sequence[RunData], now_s: float) -> str:
    return _per_run(runs, [_list(run, now_s) for run in runs])


def _list(run: RunData, now_s: float) -> str:
    items = "".join(
        f'<li class="{each.level}"><strong>{escaped(each.title)}</strong>'
        f"<span>{escaped(each.remedy)}</span></li>"
        for each in findings_of(run, now_s)
    )
    return f'<ul class="findings">{items}</ul>' if items else "<p>Nothing stands out.</p>"


def _figures(runs: Sequence[RunData]) -> str:
    found = headlines_of(runs)
    if len(runs) > 1:
        rows = [(each.label, *each.cells) for each in found]
        return table(("", *(run.name for run in runs)), rows, "numbers")
    cards = "".join(
        f"<div><dt>{escaped(each.label)}</dt><dd>{escaped(each.cells[0].value)}"
        + "".join(
            f"<small>{escaped(text)}</small>" for text in (each.cells[0].rest, each.hint) if text
        )
        + "</dd></div>"
        for each in found
    )
    return f'<dl class="figures">{cards}</dl>'


def _no_timeline(runs: Sequence[RunData]) -> str:
    missing = [run for run in runs if run.timeline is None]
    return "".join(
        f"<p>{escaped(run.name)}: no time line was recorded (metrics.trace writes it).</p>"
        for run in missing
    )


def _failures(runs: Sequence[RunData]) -> str:
    parts: list[str] = []
    for run in runs:
        rows = list(failures_of(run))
        parts.append(table(("what", "how much, or which"), rows) if rows else "<p>None.</p>")
    return _per_run(runs, parts)


def _servers(runs: Sequence[RunData]) -> str:
    parts: list[str] = []
    for run in runs:
        rows = [
            (
                each.url,
                plain(each.rollouts),
                plain(each.tokens),
                "left" if each.version is None else plain(each.version),
            )
            for each in run.servers
        ]
        head = ("server", "rollouts", "tokens", "version it holds")
        inside = table(head, rows, "numbers") if rows else ""
        many = len(rows) > MOST_LOGS
        parts.append(folded(f"{len(rows)} servers", inside) if many else inside)
    return _per_run(runs, parts) if any(parts) else ""


def _settings(runs: Sequence[RunData]) -> str:
    resolved = [run.config for run in runs]
    rows = [
        (each.key, each.default, *each.values)
        for each in sorted(settings_of(resolved), key=lambda each: not each.differs_between_runs)
    ]
    parts = [table(("key", "default", *(run.name for run in runs)), rows, "keys")] if rows else []
    for run in runs:
        if run.config is None:
            parts.append(f"<p>{escaped(run.name)}: no configuration can be read.</p>")
            continue
        if run.config.own is None:
            parts.append(
                f"<p>{escaped(run.name)}: this version does not accept its configuration, so "
                "defaults are not known.</p>"
            )
        parts.append(folded(f"all keys of {run.name}", f"<pre>{escaped(run.config.text)}</pre>"))
    return "".join(parts)


def _logs(runs: Sequence[RunData]) -> str:
    parts = ["".join(_log_ends(run)) for run in runs]
    return _per_run(runs, parts) if any(parts) else ""


def _log_ends(run: RunData) -> Iterator[str]:
    logs = sorted(run.logs, key=_log_order)
    for log in logs[:MOST_LOGS]:
        opened = run.state.state in ("failed", "crashed") and log.name == logs[0].name
        title = f"{log.name} ({size(log.num_bytes)})"
        yield folded(title, f"<pre>{escaped(log.end)}</pre>", opened=opened)
    if len(logs) > MOST_LOGS:
        yield f"<p>and {len(logs) - MOST_LOGS} more in {escaped(run.path / 'logs')}</p>"


def _log_order(log: LogFile) -> tuple[int, str]:
    first = FIRST_LOGS.index(log.name) if log.name in FIRST_LOGS else len(FIRST_LOGS)
    return first, log.name
