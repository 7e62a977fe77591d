"""The page of `opd report` in a real browser: it draws, it reacts, and nothing of a run can act."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.cli.main import main
from megatron_opd.metrics.trace import TraceWriter
from megatron_opd.report.series import MOST_POINTS
from tests.support.browser import DESKTOP, PHONE
from tests.support.report_runs import row_of, written

Open = Callable[..., Any]
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
# every chart at once: those below the fold are drawn when they come into view
WHOLE = {DESKTOP: (1280, 9000), PHONE: (390, 16000)}


def reported(*runs: Path) -> str:
    out = runs[0].parent / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    return out.as_uri()


def traced(path: Path, engine: str = "http://a:1") -> Path:
    """A good run with a time line."""
    run = written(path, 12, {})
    trace = TraceWriter(run / "trace.json", 0.0)
    for update in range(12):
        begin_s = 2.0 * update
        trace.span(f"student {engine}", "rollout v0", begin_s, begin_s + 1.2)
        trace.span("teacher scoring", "score", begin_s + 0.9, begin_s + 1.4)
        trace.span("learner", f"update {update}", begin_s + 1.0, begin_s + 2.0)
        trace.span("weight sync", "weight sync", begin_s + 1.8, begin_s + 2.0)
        trace.span(f"student {engine}", "paused", begin_s + 1.9, begin_s + 2.0, lane=0)
    trace.span("evaluation", "easy after 4 updates", 8.0, 13.0)
    trace.close()
    return run


def drawn(page: Any) -> None:
    """Wait until every chart that is unfolded has its curves."""
    page.wait_for_function(
        "() => { const charts = [...document.querySelectorAll('section > .grid > .chart')];"
        " return charts.length && charts.every((chart) => chart.querySelector('.uplot')); }"
    )


def colours(page: Any, place: str) -> set[str]:
    """The colours that a canvas shows, as CSS names them."""
    found = page.evaluate(
        "(place) => { const c = document.querySelector(place); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
        "for (let i = 0; i < d.length; i += 4)"
        " if (d[i + 3]) seen.add(`rgb(${d[i]}, ${d[i + 1]}, ${d[i + 2]})`);"
        " return [...seen]; }",
        place,
    )
    return set(found)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_curves_and_time_line_are_drawn_and_nothing_is_too_wide(
    tmp_path: Path, open_page: Open, size: tuple[int, int]
):
    page = open_page(reported(traced(tmp_path / "run")), WHOLE[size])
    drawn(page)
    assert page.locator("section > .grid > .chart").count() > 8
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    assert len(colours(page, ".chart canvas")) > 3
    painted = colours(page, ".lanes canvas")
    assert len(painted) > 5
    place = page.locator(".lanes canvas")
    legend = page.locator(".lanes + .legend span").filter(has_text="evaluation").locator("i")
    mark = legend.evaluate("(mark) => getComputedStyle(mark).backgroundColor")
    assert mark in painted
    place.hover(position={"x": 0.7 * place.bounding_box()["width"], "y": 94})
    assert page.locator(".lanes .tip").inner_text().startswith("evaluation")


def test_the_x_axis_can_be_the_wall_clock(tmp_path: Path, open_page: Open):
    page = open_page(reported(written(tmp_path / "run", 12, {})), WHOLE[DESKTOP])
    drawn(page)
    chart = page.locator(".chart").filter(has_text="Loss").locator(".u-over").first
    chart.hover()
    assert page.locator(".tip:visible").inner_text().startswith("update ")
    page.get_by_label("wall clock").check()
    drawn(page)
    chart.hover(position={"x": 100, "y": 20})
    assert " s\n" in page.locator(".tip:visible").inner_text()


def test_runs_side_by_side_can_be_hidden(tmp_path: Path, open_page: Open):
    runs = (written(tmp_path / "one", 12, {}), written(tmp_path / "two", 9, {}))
    page = open_page(reported(*runs), WHOLE[DESKTOP])
    drawn(page)
    chart = page.locator(".chart").filter(has_text="Gradient norm").locator(".u-over")
    chart.hover()
    assert page.locator(".tip:visible b").count() == 2
    page.get_by_role("button", name="two").click()
    drawn(page)
    chart.hover(position={"x": 90, "y": 20})
    assert page.locator(".tip:visible").inner_text().splitlines()[1].startswith("one")
    assert page.locator(".tip:visible b").count() == 1


def test_zooming_one_chart_zooms_all_and_comes_back(tmp_path: Path, open_page: Open):
    page = open_page(reported(written(tmp_path / "run", 12, {})), WHOLE[DESKTOP])
    drawn(page)
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 40, steps=4)
    page.mouse.up()
    whole = page.get_by_role("button", name="whole run")
    whole.click()
    assert not whole.is_visible()


def test_text_of_a_run_is_text(tmp_path: Path, open_page: Open):
    run = written(
        tmp_path / "run",
        12,
        {"status": "failed", "cause": HOSTILE, "servers_lost": {HOSTILE: HOSTILE}},
        lambda update: {HOSTILE: 1.0},
    )
    rows = [
        {"update": u, "time_s": 1.0 * u, "set": HOSTILE, "accuracy_pct": 5.0 * u} for u in (1, 2)
    ]
    (run / "evaluations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trace = TraceWriter(run / "trace.json", 0.0)
    trace.span(f"student {HOSTILE}", "rollout", 0.0, 1.0)
    trace.span("learner", "update 0", 1.0, 2.0)
    trace.close()
    page = open_page(reported(run), WHOLE[DESKTOP])
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    drawn(page)
    page.locator(".lanes canvas").hover(position={"x": 400, "y": 10})
    page.locator("#curves details summary").click()
    page.locator(".chart").filter(has_text="onerror").last.locator(".u-over").hover()
    assert page.locator("img").count() == 0
    assert "\\u202e" in page.locator("#findings").inner_text()
    assert dialogs == []


def test_a_long_run_opens(tmp_path: Path, open_page: Open):
    run = written(tmp_path / "run", 1, {})
    rows = (row_of(update, loss=1.0 + 9.0 * (update == 4321)) for update in range(20_000))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = open_page(reported(run), WHOLE[DESKTOP])
    drawn(page)
    loss = page.evaluate(
        "JSON.parse(document.getElementById('data').text).runs[0].tables.main.loss"
    )
    assert (len(loss), max(loss)) == (MOST_POINTS, 10.0)
    assert (tmp_path / "report.html").stat().st_size < 3e6


def test_charts_are_drawn_for_paper_too(tmp_path: Path, open_page: Open):
    page = open_page(reported(traced(tmp_path / "run")), PHONE, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    drawn(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
