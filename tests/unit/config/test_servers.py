"""The GPUs that a role's servers and the learner are given by name."""

from pathlib import Path

import pytest

from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL, write


def refusal(tmp_path: Path, *overrides: str) -> str | None:
    try:
        load_config(Config, write(tmp_path, MINIMAL), overrides)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["student.gpus=[0, 1, 2]", "student.tp=2"],
            ["student: gpus must name servers * tp = 1 * 2 = 2 GPUs, got 3: [0, 1, 2]"],
        ),
        (["teacher.gpus=[]"], ["teacher: gpus must name servers * tp = 1 * 1 = 1 GPUs, got 0"]),
        (
            ["teachers.maths={model: m, gpus: [0, 1]}"],
            ["teachers.maths: gpus must name servers * tp"],
        ),
        (
            ["student.gpus=[0]", "student.urls=['http://127.0.0.1:1']"],
            ["student: gpus must be null with urls", "elsewhere", "got [0]"],
        ),
        (["student.gpus=[-1]"], ["student.gpus", "greater than or equal to 0", "got -1"]),
        (["student.gpus=[5000]"], ["student.gpus", "less than 1024", "got 5000"]),
        (["student.gpus=[1, 1]", "student.servers=2"], ["student.gpus: must name each GPU once"]),
        (["learner.gpus=[2, 2]"], ["learner.gpus: must name each GPU once, got GPU 2 twice"]),
        (["learner.gpus=[-2]"], ["learner.gpus", "greater than or equal to 0", "got -2"]),
        (["student.gpus=0"], ["student.gpus", "got 0"]),
        (["cluster.share_gpus=1"], ["cluster.share_gpus", "valid boolean", "got 1"]),
    ],
)
def test_a_list_that_cannot_be_is_one_line(tmp_path: Path, overrides: list[str], words: list[str]):
    said = refusal(tmp_path, *overrides)
    assert said is not None
    assert "\n" not in said
    for word in words:
        assert word in said


def test_lists_are_taken_as_they_are_written(tmp_path: Path):
    lists = ["student={model: s, servers: 2, tp: 2, gpus: [3, 2, 6, 7]}", "learner.gpus=[0]"]
    config = load_config(Config, write(tmp_path, MINIMAL), lists)
    assert config.student.gpus == (3, 2, 6, 7)
    assert config.learner.gpus == (0,)
    assert config.teacher
    assert config.teacher.gpus is None
