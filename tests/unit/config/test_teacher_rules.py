"""Where a teacher cannot read what is given in a rendering of its own."""

from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL

READING = {"chat_template": True}
GAME = {"type": "guess"}


def tree(**changes: Any) -> dict[str, Any]:
    found = deepcopy(MINIMAL)
    found["data"]["chat_template"] = True
    found["teacher"] |= READING
    return found | changes


def test_a_teacher_may_read_a_game_in_its_own_template():
    Config.model_validate(tree(environment=GAME))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {**GAME, "history": "branch"}}, "environment.history branch"),
        ({"environment": {"type": "agent", "function": "m:f"}}, "environment.type agent"),
        ({"environment": GAME, "workers": {"count": 1}}, "data workers (workers.count)"),
    ],
)
def test_where_it_cannot(changes: dict[str, Any], said: str):
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(tree(**changes))
    (error,) = refused.value.errors()
    assert "teacher.chat_template must be null with " in error["msg"]
    assert said in error["msg"]
    assert error["msg"].endswith("got 'True'; leave one of them out")
