"""What is refused of a run's data before anything starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_opd.cli.errors import UserError
from megatron_opd.cli.prepare import check_step_off
from megatron_opd.config.schema import Config
from megatron_opd.data.prompts import PromptSet
from megatron_opd.types import Prompt


def prompts(number: int, whole: bool = True) -> PromptSet:
    found = tuple(Prompt(i, f"p{i}", np.arange(3, dtype=np.int32)) for i in range(number))
    return PromptSet(Path("x"), found, number, whole, {}, {}, 3)


def config(schedule: dict[str, Any], group_size: int = 1) -> Config:
    tree = {
        "data": {"train": "x"},
        "student": {"model": "m"},
        "teacher": {"model": "m"},
        "buffer": {"batch_size": 8},
        "rollout": {"group_size": group_size},
        "schedule": schedule,
    }
    return Config.model_validate(tree)


@pytest.mark.parametrize("kind", ["step_off", "controlled"])
def test_a_fixed_distance_must_fit_into_the_data(kind):
    """Three batches of 8 are in flight at once: a smaller file would meet itself."""
    schedule = {"type": kind, "max_staleness": 2}
    check_step_off(config(schedule), prompts(24))
    check_step_off(config(schedule, group_size=4), prompts(6))
    with pytest.raises(UserError) as caught:
        check_step_off(config(schedule), prompts(23))
    line = str(caught.value)
    assert f"schedule.max_staleness 2 with type {kind} keeps 24 responses in flight" in line
    assert "data.train has prompts for 23" in line


def test_who_takes_what_comes_or_has_not_read_all_is_not_refused():
    check_step_off(config({"type": "async", "max_staleness": 2.0}), prompts(3))
    check_step_off(config({"type": "step_off", "max_staleness": 2}), prompts(3, whole=False))
