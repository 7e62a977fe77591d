"""Generated pages: --check tells a page that is out of date or missing from a current one."""

from pathlib import Path

import pytest

from tools.generated_page import write_or_check


def test_a_page_is_written_and_then_current(tmp_path: Path):
    page = tmp_path / "page.md"
    assert write_or_check(page, "a §\n", ["tool.py"]) == 0
    assert page.read_text(encoding="utf-8") == "a §\n"
    assert write_or_check(page, "a §\n", ["tool.py", "--check"]) == 0


@pytest.mark.parametrize("before", ["old\n", None])
def test_a_page_that_is_old_or_missing_is_reported_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str | None
):
    page = tmp_path / "page.md"
    if before is not None:
        page.write_text(before)
    assert write_or_check(page, "new\n", ["tool.py", "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert (page.read_text() if page.exists() else None) == before
