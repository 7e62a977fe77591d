"""What plays the trajectories of a run is read, tried and made before it starts."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.environments.hosted import HostedPlaying
from megatron_opd.environments.user import UserPlaying
from megatron_opd.errors import UserError
from megatron_opd.inputs.environments import playing
from megatron_opd.inputs.prepare import Inputs, read_inputs
from tests.support.config_files import minimal
from tests.support.paths import ROOT

USER = {"type": "user", "max_tokens": 200, "instructions": "{prompt}"}
GAME = {"type": "guess", "max_tokens": 200}
ARITHMETIC = ROOT / "examples" / "arithmetic"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The example's teacher with a chat template of its own."""
    shutil.copytree(ARITHMETIC / "teacher", tmp_path / "teacher")
    (tmp_path / "teacher" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "teacher"


def config_of(teacher: Path, **sections: Any):
    data = {"train": str(ARITHMETIC / "train.jsonl"), "chat_template": True}
    return minimal(
        student={"model": str(ARITHMETIC / "student")},
        teacher={"model": str(teacher)},
        rollout={"max_new_tokens": 16, "group_size": 4},
        evaluation={"problems": 0},
        scoring={"guard": "warn"},  # of a teacher that reads another template than its own
        **{"data": data, "environment": USER} | sections,
    )


def read(teacher: Path, **sections: Any) -> Inputs:
    return read_inputs(config_of(teacher, **sections), first_rows=4)


@pytest.mark.parametrize("objective", ["reverse_kl", "grpo"])
def test_the_user_speaks_in_its_own_models_template(teacher: Path, objective: str):
    found = read(teacher, objective={"type": objective})
    assert found.user is not None
    assert found.turns is not None
    assert found.user.encoder.tokenizer.chat_template == TEMPLATE
    assert found.turns.tokenizer.chat_template != TEMPLATE
    assert found.user.context == 512 - 7


def test_what_cannot_be_played_is_refused_before_anything_starts(teacher: Path):
    long = {"environment": USER | {"instructions": "7" * 400}}
    with pytest.raises(UserError, match=r"teacher\.model: a user's conversation must fit"):
        read(teacher, **long)
    (teacher / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"teacher\.model must have a chat template to play"):
        read(teacher)


def test_a_game_has_no_user(teacher: Path):
    assert read(teacher, environment=GAME).user is None


@pytest.mark.parametrize(("section", "plays"), [(USER, UserPlaying), (GAME, HostedPlaying)])
def test_what_plays(teacher: Path, section: dict[str, Any], plays: type):
    config = config_of(teacher, environment=section)
    found = read_inputs(config, first_rows=4)

    async def made() -> object:
        async with playing(config, found.turns, found.user, {"teacher": None}) as each:  # type: ignore[dict-item]
            return each

    assert isinstance(asyncio.run(made()), plays)
