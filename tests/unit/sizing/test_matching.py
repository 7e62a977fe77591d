"""What makes learner and sampler round differently is listed, and nothing else."""

import pytest

from megatron_opd.sizing.matching import compared, differences
from tests.support.config_files import minimal
from tests.support.published import spec_of

DENSE, MOE = spec_of("Qwen3-1.7B"), spec_of("Qwen3-30B-A3B")


def config_of(parallel: dict, student: dict, dtype: str = "bfloat16"):
    return minimal(
        student={"model": "student", "dtype": "bfloat16", **student},
        learner={"dtype": dtype, "parallel": parallel},
    )


def test_equal_layouts_differ_in_nothing():
    assert differences(config_of({"tp": 2, "dp": 4, "pp": 2}, {"tp": 2}), DENSE) == []
    assert differences(config_of({"tp": 2, "dp": 4, "ep": 2}, {"tp": 2, "ep": 2}), MOE) == []
    assert differences(config_of({"tp": 2}, {"tp": 2}), MOE) == []


@pytest.mark.parametrize(
    ("parallel", "student", "dtype", "line"),
    [
        ({}, {"tp": 2}, "bfloat16", "learner.parallel.tp=1 and student.tp=2: sums over ranks"),
        ({"cp": 2}, {}, "bfloat16", "learner.parallel.cp=2 and servers have 1: attention"),
        ({}, {}, "float32", "learner.dtype=float32 and student.dtype=bfloat16: the same weights"),
    ],
)
def test_each_difference_is_one_line(parallel: dict, student: dict, dtype: str, line: str):
    (found,) = differences(config_of(parallel, student, dtype), DENSE)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"student": {"model": "s", "quantization": "int8"}},
            "learner.dtype=bfloat16 and student.quantization=int8: matrices are held as one byte",
        ),
        (
            {"weight_sync": {"round_to": "fp8"}},
            "learner.dtype=bfloat16 and weight_sync.round_to=fp8 values: matrices are only "
            "rounded: they are held in bfloat16 and save no memory",
        ),
    ],
)
def test_held_quantised_and_merely_rounded_are_told_apart(settings: dict, line: str):
    (found,) = differences(minimal(**settings), DENSE)
    assert found.startswith(line)


def test_experts_are_compared_where_there_are_some():
    config = config_of({"tp": 2, "ep": 2, "etp": 1}, {"tp": 2})
    assert differences(config, DENSE) == []
    assert [line.split(":")[0] for line in differences(config, MOE)] == [
        "learner.parallel.ep=2 and student.ep=1",
        "learner.parallel.etp=1 and student.tp / student.ep = 2",
    ]
    assert len(compared(config, MOE)) == len(compared(config, DENSE)) + 2
