"""The page: whole, self-contained, and safe whatever a run is called and says."""

import hashlib
import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import setuptools

from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.report.markup import source_hash
from megatron_opd.report.page import SCRIPTS, STYLES, page, static
from megatron_opd.report.run_data import load_runs
from tests.support.paths import ROOT
from tests.support.report_runs import simulated, written

STATIC = ROOT / "megatron_opd" / "report" / "static"
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m'\"&"


class Page(HTMLParser):
    """A page's tags with their attributes, its inline sources, and its text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._inside = ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in self.inline:
            self.inline[self._inside].append(data)
        else:
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.inline["script"][0])

    @property
    def policy(self) -> str:
        (content,) = (a["content"] for _, a in self.tags if a.get("http-equiv"))
        assert content is not None
        return content


def made(*paths: Path) -> Page:
    return Page(page(load_runs(paths), 1.7e9))


def test_the_page_needs_no_network_and_no_other_file(tmp_path: Path):
    found = made(simulated(tmp_path / "run"))
    loads = [a for _, a in found.tags if {"src", "srcset", "action", "style"} & set(a)]
    assert loads == []
    links = [str(a["href"]) for _, a in found.tags if "href" in a]
    assert all(link.startswith("#") for link in links)
    assert not any(name.startswith("on") for _, a in found.tags for name in a)
    sources = found.inline["script"][1:] + found.inline["style"]
    assert not any(re.search(r"url\(|@import|fetch\(|XMLHttp", source) for source in sources)


def test_the_policy_allows_the_inline_sources_and_nothing_else(tmp_path: Path):
    found = made(written(tmp_path / "run"))
    _data, *scripts = found.inline["script"]
    hashes = [source_hash(source) for source in (*scripts, *found.inline["style"])]
    assert len(scripts) == len(SCRIPTS)
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert f"{rules['script-src']} {rules['style-src']}".split() == hashes
    kinds = [a.get("type") for tag, a in found.tags if tag == "script"]
    assert kinds == ["application/json"] + [None] * len(SCRIPTS)


def test_nothing_of_a_run_can_act(tmp_path: Path):
    plain = made(written(tmp_path / "plain", 12, {}))
    run = written(
        tmp_path / HOSTILE.replace("/", "|"),
        12,
        {
            "status": "failed",
            "cause": HOSTILE,
            "servers_lost": {HOSTILE: HOSTILE},
            "samples_dropped": {HOSTILE: 1},
            "resumed_at_updates": [HOSTILE],
        },
        lambda update: {
            HOSTILE: 1.0,
            "length_stops": 4,
            "servers": {HOSTILE: {"version": 1, "rollouts": 1, "tokens": 1}},
        },
    )
    cut = {"rollout": {"max_new_tokens": HOSTILE}}  # the remedy for cut responses names it
    (run / "config.resolved.yaml").write_text(json.dumps({HOSTILE: HOSTILE, **cut}))
    (run / "changes.json").write_text(json.dumps([{"key": HOSTILE, "before": HOSTILE}]))
    evaluation = {"update": 3, "set": HOSTILE, "accuracy_pct": 3.0, f"pass_at_k {HOSTILE}": 2.0}
    (run / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    (run / "logs").mkdir()
    (run / "logs" / "learner.log").write_text(HOSTILE)
    trace = TraceWriter(run / "trace.json", 0.0)
    trace.span(f"student {HOSTILE}", "rollout", 0.0, 1.0)
    trace.span("learner", "update 0", 1.0, 2.0)
    trace.close()
    found = made(run)
    assert len(found.data["timelines"][0]["lanes"]) == 2
    more = {tag for tag, _ in found.tags} - {tag for tag, _ in plain.tags}
    assert more <= {"ul", "li", "strong", "span", "pre", "h3"}  # of findings and logs
    assert len(found.inline["script"]) == 1 + len(SCRIPTS)
    for text in (found.text, json.dumps(found.data, ensure_ascii=False)):
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert "\\u202e" in text
    attributes = {name for _, a in found.tags for name in a}
    assert attributes <= {name for _, a in plain.tags for name in a} | {"open"}


def test_curves_and_time_lines_are_in_the_page(tmp_path: Path):
    data = made(simulated(tmp_path / "run")).data
    (run,), (timeline,) = data["runs"], data["timelines"]
    assert run["tables"]["main"]["update"] == list(range(8))
    assert len(run["tables"]["main"]["time"]) == 8
    assert {"tokens_per_s", "staleness_mean_versions"} <= set(run["tables"]["main"])
    drawn = [
        c["column"] for s in data["sections"] for chart in s["charts"] for c in chart["curves"]
    ]
    assert sorted(drawn) == sorted(set(run["tables"]["main"]) - {"update", "time"})
    learner = next(lane for lane in timeline["lanes"] if lane["stage"] == "learner")
    assert len(learner["busy"]) == 16
    assert learner["busy"] == sorted(learner["busy"])


def test_runs_side_by_side_share_charts(tmp_path: Path):
    found = made(written(tmp_path / "a", 12, {}), simulated(tmp_path / "b"))
    assert [run["name"] for run in found.data["runs"]] == ["a", "b"]
    titles = [chart["title"] for s in found.data["sections"] for chart in s["charts"]]
    assert len(titles) == len(set(titles))
    assert "Nothing stands out." in found.text
    assert "finished, simulated" in found.text


def test_evaluations_are_the_first_curves(tmp_path: Path):
    run = written(tmp_path / "run")
    rows = [
        {"update": u, "time_s": 2.0 * u, "set": name, "accuracy_pct": 50.0 + u, "stderr_pct": 1.0}
        for u in (4, 8)
        for name in ("one", "two")
    ]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first = made(run).data["sections"][0]
    assert first["title"] == "Evaluation"
    (chart,) = first["charts"]
    assert [curve["label"] for curve in chart["curves"]] == ["one", "two"]
    assert chart["unit"] == "%"


def test_crashed_and_unfinished_runs_have_a_page(tmp_path: Path):
    run = simulated(tmp_path / "run", updates=12)
    (run / "summary.json").unlink()
    for name in ("metrics.jsonl", "trace.json"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) * 2 // 3])
    found = made(run)
    assert "ended without a summary" in found.text
    assert 6 <= len(found.data["runs"][0]["tables"]["main"]["update"]) < 12
    assert found.data["timelines"][0]["lanes"]


def test_a_failed_run_opens_its_first_log(tmp_path: Path):
    run = written(tmp_path / "run", 12, {"status": "failed", "cause": "x"})
    (run / "logs").mkdir()
    (run / "logs" / "learner.log").write_text("Traceback: here\n")
    (run / "logs" / "a.log").write_text("fine\n")
    found = made(run)
    opened = [("open" in a) for tag, a in found.tags if tag == "details"]
    assert opened.count(True) == 1
    assert found.text.index("Traceback: here") < found.text.index("fine")


@pytest.mark.parametrize("name", ["uPlot.iife.min.js", "uPlot.min.css", "LICENSE"])
def test_the_chart_library_is_the_published_one(name: str):
    origin = json.loads((STATIC / "uplot" / "ORIGIN.json").read_text())
    content = (STATIC / "uplot" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == origin["sha256"][name]


def test_no_script_ends_its_own_element():
    for name in (*SCRIPTS, *STYLES):
        assert not re.search(r"</(script|style)|<!--", static(name), re.IGNORECASE), name


def test_a_wheel_holds_every_file_that_the_page_is_made_of(monkeypatch: pytest.MonkeyPatch):
    facts: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **given: facts.update(given))
    runpy.run_path("setup.py")
    patterns = facts["package_data"]["megatron_opd.report"]
    shipped = {path for pattern in patterns for path in STATIC.parent.glob(pattern)}
    files = {path for path in STATIC.rglob("*") if path.is_file()}
    assert files <= shipped
    assert {STATIC.joinpath(*name.split("/")) for name in (*SCRIPTS, *STYLES)} <= files
