"""What becomes of a run's training data before anything starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_opd.config.schema import Config
from megatron_opd.data.prompts import PromptSet
from megatron_opd.data.template import RunTemplate
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.errors import UserError
from megatron_opd.inputs.prompts import (
    check_enough,
    lasting,
    prompt_source,
    seen_problems,
    sources_of,
    used_up,
)
from megatron_opd.inputs.rendering import rendering_of, template_notes
from megatron_opd.records.types import Prompt
from tests.support.prompt_sets import prompt_set

ASYNC = {"type": "async", "max_staleness": 2.0}


def prompts(number: int, whole: bool = True, path: str = "x") -> PromptSet:
    found = tuple(Prompt(i, f"{path}{i}", np.arange(3, dtype=np.int32)) for i in range(number))
    return prompt_set(path, found, whole=whole)


def config(schedule: dict[str, Any], group_size: int = 1, **data: Any) -> Config:
    tree = {
        "run": {"max_steps": 10},
        "data": {"train": ["x", "y"], **data},
        "student": {"model": "m"},
        "teacher": {"model": "m"},
        "buffer": {"batch_size": 8},
        "rollout": {"group_size": group_size},
        "schedule": schedule,
    }
    return Config.model_validate(tree)


@pytest.mark.parametrize("kind", ["step_off", "controlled"])
def test_a_fixed_distance_must_fit_into_the_data(kind):
    """Three batches of 8 are in flight at once: smaller files would meet themselves."""
    schedule = {"type": kind, "max_staleness": 2}
    check_enough(config(schedule), [prompts(20), prompts(4)])
    check_enough(config(schedule, group_size=4), [prompts(3), prompts(3)])
    with pytest.raises(UserError) as caught:
        check_enough(config(schedule), [prompts(11), prompts(12)])
    line = str(caught.value)
    assert f"schedule.max_staleness 2 with type {kind} keeps 24 responses in flight" in line
    assert "data.train has prompts for 23" in line


def test_who_takes_what_comes_or_has_not_read_all_is_not_refused():
    check_enough(config(ASYNC), [prompts(1), prompts(2)])
    schedule = {"type": "step_off", "max_staleness": 2}
    check_enough(config(schedule), [prompts(3), prompts(3, whole=False)])


def test_data_that_ends_before_a_batch_is_full_is_refused():
    both = [prompts(3), prompts(4)]
    check_enough(config(ASYNC, epochs=2), both)
    with pytest.raises(UserError, match=r"prompts for 7 responses with data.epochs 1, .* is 8"):
        check_enough(config(ASYNC, epochs=1), both)


def test_a_note_says_where_the_data_ends_the_run():
    both = [prompts(20), prompts(7)]
    (line,) = lasting(config(ASYNC, epochs=2), both)
    assert "data.train lasts for 6 updates with data.epochs 2" in line
    assert "before run.max_steps 10" in line
    assert lasting(config(ASYNC, epochs=3), both) == []
    assert lasting(config(ASYNC), both) == []
    assert used_up(config(ASYNC, epochs=2), 10) == []
    assert used_up(config(ASYNC, epochs=2), 6) == [
        "data.train is used up after 6 updates: data.epochs 2"
    ]


def test_files_without_weights_are_one_source_and_files_with_weights_one_each():
    both = [prompts(3), prompts(4)]
    (whole,) = sources_of(config(ASYNC), both)
    assert (whole.name, len(whole.prompts)) == ("x, y", 7)
    weighted = [{"path": "x", "weight": 3}, {"path": "y", "weight": 1.5}]
    found = sources_of(config(ASYNC, train=weighted), both)
    assert [(each.name, len(each.prompts), each.weight) for each in found] == [
        ("x", 3, 3.0),
        ("y", 4, 1.5),
    ]
    source = prompt_source(config(ASYNC, train=weighted, epochs=1), both).at(2)
    assert next(source).uid == 2
    assert 3 <= source.available(99) < 7


def test_problems_that_are_trained_on_are_counted():
    heldout = Path("y"), prompts(5, path="y").examples
    assert seen_problems([prompts(3), prompts(4)], "heldout", *heldout) == []
    (line,) = seen_problems([prompts(3), prompts(2, path="y")], "heldout.hard", *heldout)
    assert line.startswith("2 of 5 prompts of data.heldout.hard y are in data.train x, y too")
    assert seen_problems([], "heldout", *heldout) == []


def test_variables_that_the_template_does_not_read_are_named():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking %}!{% endif %}{{ messages[0].content }}"

    def noted(**kwargs: Any) -> list[str]:
        with_kwargs = config(ASYNC, chat_template=True, chat_template_kwargs=kwargs)
        return template_notes(rendering_of(with_kwargs.data, RunTemplate()), tokenizer)

    assert noted(enable_thinking=False) == []
    (line,) = noted(enable_thinking=False, thinking=True, enable=1)
    assert "does not read thinking, enable, which has no effect" in line
