"""Rows of `opd check` on servers."""

import pytest

from megatron_opd.cli.tables.check import server_row
from tests.support.config_files import minimal


@pytest.mark.parametrize(
    ("api", "scored"), [("sglang", "path or teacher_topk"), ("chat", "nothing")]
)
def test_servers_of_somebody_else_say_what_they_score(api: str, scored: str):
    teacher = {"model": "m", "urls": ["http://127.0.0.1:7"], "api": api}
    config = minimal(teacher=teacher, objective={"type": "sft_on_teacher"})
    row = server_row(config, "teacher")
    assert row == (f"http://127.0.0.1:7; without the plugin, asked as {api}, which scores {scored}")
    assert server_row(config, "student").startswith("1 started on 127.0.0.1; tp 1")
