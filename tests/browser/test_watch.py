"""The page of `opd watch` as its readers use it, in a real browser."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.browser import DESKTOP, PATIENCE_MS, PHONE, watching
from tests.support.watched_run import (
    HOSTILE,
    append_row,
    hostile_row,
    make_crashed,
    make_running,
    rollout_row,
    turns_row,
    write_evaluations,
    write_metrics,
    write_rollouts,
    write_run,
)

Open = Callable[..., Any]
PAINTED = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
VIEWS = ("curves", "engines", "rollouts")


def expect(subject: Any) -> Any:
    from playwright.sync_api import expect as checks

    checks.set_options(timeout=PATIENCE_MS)
    return checks(subject)


def view(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name.capitalize()).click()
    expect(page.locator(f"#{name}")).to_be_visible()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("finished") / "demo", updates=30)
    append_row(path, hostile_row(30, 4000))
    write_evaluations(path, range(0, 30, 5), ("gsm8k", "aime24"))
    return path


@pytest.fixture(scope="module")
def address(finished: Path) -> Iterator[str]:
    with watching(finished) as found:
        yield found


def test_evaluations_with_an_environment_show_rewards_turns_and_calls(
    tmp_path: Path, open_page: Open
):
    path = write_run(tmp_path / "plain", updates=3)
    write_evaluations(path, range(3), ("gsm8k",))
    other = write_run(tmp_path / "played", updates=3)
    write_evaluations(other, range(3), ("tools",), {"mean_turns": 2.5, "mean_tool_calls": 1.25})
    figures = ["mean reward", "mean turns", "mean tool calls"]
    with watching(path) as address:
        page = open_page(address)
        expect(page.locator(".chart[aria-label='accuracy · gsm8k']")).to_be_visible()
        expect(page.locator(".chart[aria-label*='mean reward ·']")).to_have_count(0)
        page.close()  # it would ask on after the server has ended
    with watching(other) as address:
        page = open_page(address)
        for place, figure in enumerate(["accuracy", *figures]):
            chart = page.locator(".chart").nth(place)
            expect(chart).to_have_attribute("aria-label", f"{figure} · tools")
        expect(page.locator(".chart output").nth(2)).to_have_text("2.5")
        page.close()


def test_every_view_of_a_finished_run_loads(address: str, open_page: Open):
    page = open_page(address)
    expect(page).to_have_title("demo: opd watch")
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#done")).to_have_text("update 30 of 30")
    assert "token" not in page.url
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert page.locator(".chart").count() >= 9
    expect(page.locator(".chart canvas")).to_have_count(page.locator(".chart").count())
    for chart in page.locator(".chart canvas").all():
        assert chart.evaluate(PAINTED)
    accuracy = page.locator(".chart").first
    expect(accuracy).to_have_attribute("aria-label", "accuracy · gsm8k, accuracy · aime24")
    expect(accuracy.locator("output")).to_have_text("67.13 · 42.13")
    view(page, "engines")
    expect(page.locator(".lane canvas")).to_have_count(7)
    expect(page.locator("#window")).to_have_text("0.0 s to 1 min 36 s of 1 min 36 s")
    for lane in page.locator(".lane canvas").all():
        assert lane.evaluate(PAINTED)
    page.locator("#span").select_option("60")
    expect(page.locator("#window")).to_have_text("36 s to 1 min 36 s of 1 min 36 s")
    page.locator("#earlier").click()
    expect(page.locator("#window")).to_have_text("6.0 s to 1 min 6 s of 1 min 36 s")
    expect(page.locator(".lane .name").first).to_have_text("127.0.0.1:30000")
    expect(page.locator(".lane .name").nth(6)).to_have_text("evaluation")
    view(page, "rollouts")
    expect(page.locator("#found")).to_have_text("241 rollouts")
    page.locator(".row").nth(3).click()
    expect(page.locator("#detail .tokens .t")).to_have_count(40)


@pytest.mark.parametrize("kind", ["crashed", "begun"])
def test_a_run_that_has_no_end_loads_too(tmp_path: Path, open_page: Open, kind: str):
    if kind == "crashed":
        make_crashed(write_run(tmp_path / "run", updates=4, per_update=2))
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/config.resolved.yaml").write_text("run: {max_steps: 5}\n")
        make_running(tmp_path / "run")
    with watching(tmp_path / "run") as address:
        page = open_page(address)
        expect(page.locator("#state")).to_have_text("crashed" if kind == "crashed" else "running")
        view(page, "engines")
        expect(page.locator("#no-lanes")).to_be_visible(visible=kind == "begun")
        view(page, "rollouts")
        found = "8 rollouts" if kind == "crashed" else "0 rollouts"
        expect(page.locator("#found")).to_have_text(found)


def test_a_running_run_updates_without_a_reload(tmp_path: Path, open_page: Open):
    path = write_run(tmp_path / "run", updates=3, per_update=4, of=9)
    make_running(path)
    with watching(path) as address:
        page = open_page(address)
        page.evaluate("window.same = true")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#done")).to_have_text("update 3 of 9")
        view(page, "rollouts")
        expect(page.locator("#found")).to_have_text("12 rollouts")
        write_metrics(path, range(3, 5), 9)
        write_rollouts(path, range(3, 5), 4)
        expect(page.locator("#done")).to_have_text("update 5 of 9")
        expect(page.locator("#found")).to_have_text("20 rollouts")
        expect(page.locator("#row-0")).to_contain_text("update 4")
        view(page, "curves")
        loss = page.get_by_role("group", name="loss", exact=True).locator("output")
        before = loss.text_content()
        write_metrics(path, range(5, 6), 9)
        expect(loss).not_to_have_text(before)
        # a list that is read does not move: new rows are offered
        view(page, "rollouts")
        page.locator("[name=sort]").select_option("gap")
        expect(page.locator("#filters")).to_have_attribute("data-query", contains("gap"))
        write_rollouts(path, range(5, 6), 4)
        expect(page.locator("#newer")).to_have_text("show 4 new")
        page.locator("#newer").click()
        expect(page.locator("#found")).to_have_text("24 rollouts")
        # rolled back: the file is another one
        (path / "rollouts.jsonl").unlink()
        write_rollouts(path, range(2), 4, seed=3)
        expect(page.locator("#found")).to_have_text("8 rollouts")
        (path / "summary.json").write_text('{"status": "finished"}')
        (path / "run.lock").unlink()
        expect(page.locator("#state")).to_have_text("finished")
        assert page.evaluate("window.same")


def contains(text: str) -> Any:
    return re.compile(re.escape(text))


def test_hostile_text_is_text(address: str, open_page: Open):
    page = open_page(address, provoked=("requires 'TrustedHTML'",))
    before = page.locator("script").count()
    view(page, "rollouts")
    page.locator("#f-text").fill("window.hacked")
    expect(page.locator("#found")).to_have_text("1 of 241 rollouts")
    row = page.locator(".row").first
    expect(row).to_contain_text("<script>window.hacked = 1</script>")
    row.click()
    tokens = page.locator("#detail .tokens .t")
    expect(tokens).to_have_count(len(HOSTILE))
    assert tokens.nth(0).text_content() == HOSTILE[0]
    assert tokens.nth(1).text_content() == HOSTILE[1]
    assert tokens.nth(2).text_content() == "aRLO U+202EltrPDF U+202C b"
    assert tokens.nth(3).text_content() == "ESC U+001B[31mredESC U+001B[0m"
    assert tokens.nth(4).text_content() == "zeroZWSP U+200Bwidth"
    shown = page.locator("body").inner_text()
    assert not set(shown) & set("\u202e\u202c\x1b\u200b")
    expect(page.locator("#detail")).to_contain_text("<b>teacher</b>")
    assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == before
    assert page.locator("main img, main svg, main b b").count() == 0
    # nothing on the page can turn text into HTML or run text, not even its own scripts
    tried = "() => { try { document.body.innerHTML = '<p>'; return 1 } catch { return 0 } }"
    assert page.evaluate(tried) == 0


def test_tokens_are_coloured_by_what_student_and_teacher_think(tmp_path: Path, open_page: Open):
    """Each of five tokens: student's and teacher's log-prob, and the classes that show them."""
    told = [
        (-0.1, -5.1, "low4", "low1", "low4"),
        (-3.0, -1.0, "high3", "low3", "low2"),
        (-0.2, -0.24, "", "low1", "low1"),
        (-0.01, -0.7, "low2", "", "low2"),
        (-0.6, -0.3, "high1", "low2", "low1"),
    ]
    path = write_run(tmp_path / "run", updates=0)
    row = msgspec.structs.replace(
        rollout_row(np.random.default_rng(0), 3, 9),
        tokens=list("abcde"),
        sampler_logp=[each[0] for each in told],
        teacher_logp=[each[1] for each in told],
        spans=[(1, 0, 2), (2, 2, 3), (3, 3, 5)],
    )
    append_row(path, row)
    append_row(path, msgspec.structs.replace(row, uid=10, teacher_logp=None))
    unscored = [None, *row.teacher_logp[1:]]  # by a teacher of another tokenizer
    append_row(path, msgspec.structs.replace(row, uid=11, teacher_logp=unscored, chunked=True))
    with watching(path) as address:
        page = open_page(address)
        view(page, "rollouts")
        page.locator(".row").nth(2).click()
        tokens, by = page.locator(".tokens .t"), page.get_by_label("colour tokens by")
        begins = ["", "", " begins", " begins", ""]

        def classes() -> list[str]:
            return [
                name.replace("t ", "", 1)
                for name in tokens.evaluate_all("e => e.map(t => t.className)")
            ]

        expect(tokens).to_have_count(5)
        for column, choice in ((2, "difference"), (3, "student"), (4, "teacher")):
            by.select_option(choice)
            found = [f"{each[column]}{mark}" for each, mark in zip(told, begins, strict=True)]
            assert classes() == found
        by.select_option("version")
        assert [name[:2] for name in classes()] == ["v0", "v0", "v1", "v0", "v0"]
        tokens.nth(0).hover()
        inspect = page.locator(".inspect")
        expect(inspect).to_contain_text("token 1 of 5, version 1: a")
        expect(inspect).to_contain_text("student -0.1 nats (90.5%)")
        expect(inspect).to_contain_text("teacher -5.1 nats (0.61%)")
        expect(inspect).to_contain_text("student -5")
        page.locator(".tokens").focus()
        page.keyboard.press("n")
        expect(inspect).to_contain_text("token 2 of 5")
        expect(page.locator(".spans span")).to_have_text(["v1", "v2", "v3"])
        # without a teacher there is nothing to be compared
        page.locator(".row").nth(1).click()
        expect(by.locator("option")).to_have_count(2)
        expect(page.locator("#detail")).not_to_contain_text("gap to the teacher")
        page.locator(".row").nth(0).click()
        expect(by.locator("option")).to_have_count(3)  # a chunk's score is no probability
        shown = [f"{each[2]}{mark}" for each, mark in zip(told, begins, strict=True)]
        assert classes() == ["", *shown[1:]]
        tokens.nth(0).hover()
        expect(inspect).to_contain_text("no token of the same bytes here")
        tokens.nth(1).hover()
        expect(inspect).to_contain_text("student, of its chunk +2")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_a_trajectory_is_shown_turn_by_turn(tmp_path: Path, open_page: Open, size: tuple[int, int]):
    path = write_run(tmp_path / "run", updates=1, per_update=1)
    append_row(path, turns_row(3, 9))
    with watching(path) as address:
        page = open_page(address, size)
        before = page.locator("script").count()
        view(page, "rollouts")
        page.locator(".row").first.click()
        heads = page.locator(".tokens section > h4")
        expect(heads).to_have_count(4)
        facts = "version 2 · 6 tokens · sampled in 2.0 s · answered in 4.0 s"
        expect(heads.nth(0)).to_have_text(f"student, turn 1reward +0.5{facts}")
        expect(heads.nth(1)).to_have_text("given by tool")
        expect(heads.nth(2)).to_contain_text("versions 2 to 3 · 8 tokens")
        expect(heads.nth(2)).to_contain_text("61 cached before it")
        expect(heads.nth(3)).to_contain_text("turn 3reward -1")
        turns = page.locator(".tokens section.turn")
        assert [turn.locator(".t").count() for turn in turns.all()] == [6, 8, 4]
        calls = page.locator(".call")
        expect(calls.nth(0)).to_have_text('calls calculate({"expression": "9 + 75"})')
        expect(calls.nth(1)).to_contain_text(f"error: {HOSTILE[0]}")
        expect(calls.nth(2)).to_contain_text("unreadable callerror: the call must be JSON")
        assert [call.get_attribute("class") for call in calls.all()] == [
            "call",
            "call wrong",
            "call wrong",
            "call",
        ]
        given = page.locator(".tokens section.given")
        expect(given.nth(0)).to_contain_text(HOSTILE[1])
        history = given.nth(1).locator("details")
        expect(history).to_contain_text("given: the history of sequence 2 (rewritten)")
        expect(history.locator(".said")).to_be_hidden()
        expect(page.locator(".times-key")).to_have_text(
            "10 s: sampling 3.3 s environment 5.3 s waiting 0.8 s other 0.8 s "
        )
        widths = page.locator(".times span").evaluate_all("e => e.map(p => p.offsetWidth)")
        assert widths[1] > widths[0] > widths[2] > 0
        # arrow keys go on from turn to turn
        page.locator(".tokens").focus()
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        expect(page.locator(".inspect")).to_contain_text("token 7 of 18, version 2: Once")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate("document.querySelector('#detail').scrollWidth") <= size[0]
        assert page.evaluate("window.hacked") is None
        assert page.locator("script").count() == before
        assert page.locator("main img, main svg, main .tokens script").count() == 0
        assert not set(page.locator("body").inner_text()) & set("\u202e\u202c\x1b\u200b")


@pytest.mark.parametrize("query", ["", "?token=wrong"])
def test_without_the_token_there_is_no_page(address: str, browser: Any, query: str):
    from tests.support.browser import tab

    with tab(browser) as other:
        answer = other.page.goto(address.partition("?")[0] + query)
        assert answer.status == 403
        assert "token is missing or wrong" in other.page.locator("body").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_sideways_scrolling(
    address: str, open_page: Open, scheme: str
):
    page = open_page(address, PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    expect(page.locator(".chart canvas").first).to_be_visible()

    def overflow() -> int:
        # not innerWidth: a phone zooms out until what overflows fits
        return page.evaluate("document.documentElement.scrollWidth") - PHONE[0]

    for name in VIEWS:
        view(page, name)
        page.wait_for_load_state("networkidle")
        assert overflow() == 0
    page.locator("#more summary").click()
    assert overflow() == 0
    page.locator("#more summary").click()
    page.locator("#f-text").fill("window.hacked")
    expect(page.locator("#found")).to_have_text("1 of 241 rollouts")
    page.locator(".row").first.tap()
    expect(page.locator("#detail .tokens")).to_be_visible()
    assert overflow() == 0
    assert page.evaluate("document.querySelector('#detail').scrollWidth") <= PHONE[0]
    page.get_by_role("button", name="\N{LEFTWARDS ARROW} list").tap()
    expect(page.locator("#detail")).to_be_hidden()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(246, 247, 249)") == (scheme == "light")


def test_the_keyboard_reaches_everything(address: str, open_page: Open):
    page = open_page(address)
    page.get_by_role("tab", name="Curves").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#rollouts")).to_be_visible()
    expect(page.get_by_role("tab", name="Rollouts")).to_be_focused()
    expect(page.locator(".row").first).to_be_visible()
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#list")).to_have_attribute("aria-activedescendant", "row-1")
    expect(page.locator("#row-1")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#detail .tokens .t")).to_have_count(40)
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".inspect")).to_contain_text("token 2 of 40")
    expect(page.locator(".inspect")).to_contain_text("teacher \N{MINUS SIGN} student")
    page.keyboard.press("End")
    expect(page.locator(".inspect")).to_contain_text("token 40 of 40")
    page.locator(".tokens .t").nth(4).hover()
    expect(page.locator(".inspect")).to_contain_text("token 5 of 40")
    page.get_by_role("button", name="next rollout").click()
    expect(page.locator("#row-2")).to_have_attribute("aria-selected", "true")
    page.locator("#list").focus()
    page.keyboard.press("End")
    expect(page.locator("#row-240")).to_have_attribute("aria-selected", "true")


def test_filters_narrow_the_list(address: str, open_page: Open):
    page = open_page(address, provoked=("status of 400",))
    view(page, "rollouts")
    expect(page.locator("#found")).to_have_text("241 rollouts")
    page.locator("#f-outcome").select_option("drop:nan_score")
    expect(page.locator("#found")).to_have_text("6 of 241 rollouts")
    expect(page.locator(".row .tag.drop")).to_have_count(6)
    page.locator(".row").first.click()
    expect(page.locator("#detail .notice")).to_contain_text("returned NaN")
    page.locator("[name=update_max]").fill("9")
    expect(page.locator("#found")).to_have_text("2 of 241 rollouts")
    page.locator("[name=update_min]").fill("many")
    expect(page.locator("#found")).to_contain_text("update_min must be a number")
    expect(page.locator("[name=update_min]")).to_have_class(contains("bad"))
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#found")).to_have_text("241 rollouts")
    page.locator("[name=sort]").select_option("gap")
    expect(page.locator("#filters")).to_have_attribute("data-query", contains("gap"))
    gaps = [text.split("gap ")[1] for text in page.locator(".row .meta").all_inner_texts()[:5]]
    values = [float(gap.split()[0]) for gap in gaps]
    assert values == sorted(values, reverse=True)


def test_a_hundred_thousand_rollouts_scroll_and_filter(
    tmp_path_factory: pytest.TempPathFactory, open_page: Open
):
    path = write_run(tmp_path_factory.mktemp("large") / "run", updates=1000, per_update=100)
    append_row(path, hostile_row(1000, 99))
    with watching(path) as address:
        page = open_page(f"{address}#rollouts")
        expect(page.locator("#count")).to_have_text("100,001")
        expect(page.locator("#notice")).to_be_hidden()
        view(page, "rollouts")
        page.locator("#newer").click() if page.locator("#newer").is_visible() else None
        expect(page.locator("#found")).to_have_text("100,001 rollouts")
        page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight / 2 }")
        expect(page.locator("#row-50000")).to_contain_text("update")
        page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight }")
        expect(page.locator("#row-100000")).to_contain_text("update 0")
        seen = page.locator("#list").evaluate("list => list.clientHeight / 66")
        assert page.locator(".row").count() <= seen + 14
        page.locator("#f-text").fill("window.hacked")
        expect(page.locator("#found")).to_have_text("1 of 100,001 rollouts")
        page.locator("#f-text").fill("")
        page.locator("[name=update_min]").fill("500")
        page.locator("[name=update_max]").fill("509")
        expect(page.locator("#found")).to_have_text("1,000 of 100,001 rollouts")
        expect(page.locator("#row-0")).to_contain_text("update 509")
