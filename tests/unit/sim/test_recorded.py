"""Lengths of a recorded run, also of one that was killed."""

from pathlib import Path

import pytest

from megatron_opd.sim.recorded import recorded_lengths

ROLLOUT = '{"name":"rollout v%d","args":{"prompt_tokens":%d,"response_tokens":%d}}'


def test_lengths_are_those_of_the_rollouts(tmp_path: Path) -> None:
    score = '{"name":"score","args":{"prompt_tokens":9,"response_tokens":9}}'
    lines = [ROLLOUT % (0, 5, 7), score, ROLLOUT % (1, 6, 8), '{"name":"rollout v2","args":{"pro']
    (tmp_path / "trace.json").write_text("[\n" + ",\n".join(lines))
    assert recorded_lengths(tmp_path).pairs == [(5, 7), (6, 8)]


def test_a_run_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace\.json: No such file or directory; metrics\.trace"):
        recorded_lengths(tmp_path)
    (tmp_path / "trace.json").write_text("[\n]\n")
    with pytest.raises(ValueError, match=r"trace\.json holds no rollout$"):
        recorded_lengths(tmp_path)
