"""What each type of schedule means, what it refuses, and verl's names for the same."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schedule import NATURAL, ScheduleConfig, Type
from megatron_opd.config.schema import Config

BATCH = 8
TYPES = get_args(Type)
DRAWN = {"type": "weibull"}
HELD = {"type": "controlled", "delays": DRAWN}


def made(**keys: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("kind", "permits", "bound", "every", "held", "in_flight"),
    [
        ("sync", 8, 0, 1, 0, "in_place"),
        ("step_off", 16, 1, 1, 0, "keep"),
        ("stream", 32, 3, 4, 0, "in_place"),
        ("stale", 48, 5, 4, 0, "keep"),
        ("partial", 48, 5, 4, 0, "in_place"),
        ("async", 16, 1, 1, 0, "in_place"),
        ("controlled", 16, 1, 1, 1, "in_place"),
    ],
)
def test_every_type_is_valid_by_its_name_alone(
    kind: str, permits: int, bound: int, every: int, held: int, in_flight: str
):
    assert set(TYPES) == set(NATURAL)
    schedule = made(type=kind)
    assert (schedule.permits(BATCH), schedule.bound(BATCH)) == (permits, bound)
    assert (schedule.sync_every, schedule.held, schedule.in_flight) == (every, held, in_flight)
    assert ScheduleConfig.model_validate(schedule.model_dump()) == schedule


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"type": "sync", "max_staleness": 1}, "max_staleness must be 0 with type sync, got 1"),
        ({"type": "sync", "sync_every": 2}, "sync_every must be 1 with type sync, got 2"),
        ({"type": "stream", "max_staleness": 0.5}, "must be 0 with type stream, got 0.5"),
        ({"type": "stream", "sync_every": 1}, "above 1 with type stream, got 1; use type sync"),
        ({"type": "stale", "max_staleness": 0}, "above 0 with type stale, got 0; use type stream"),
        ({"type": "stale", "in_flight": "abort"}, "must be keep with type stale, got abort"),
        ({"type": "partial", "in_flight": "keep"}, "got keep; use type stale"),
        ({"type": "step_off", "max_staleness": 0.5}, "a whole number with type step_off, got 0.5"),
        ({"type": "step_off", "max_staleness": 0}, "at least 1 with type step_off, got 0"),
        ({"type": "step_off", "in_flight": "in_place"}, "must be keep with type step_off"),
        ({"type": "controlled", "max_staleness": 1.5}, "a whole number with type controlled"),
        ({"type": "controlled", "hold_batches": 0}, "must be max_staleness with type controlled"),
        ({"type": "partial", "hold_batches": 1}, "must be 0 with type partial, got 1"),
        ({"hold_batches": 2}, "<= max_staleness * sync_every = 1, which limits"),
        ({"max_age": 3}, "max_age must be null with order admission, got 3"),
        ({"order": "completion", "hold_batches": 1}, "order must be admission with hold_batches"),
        ({"delays": DRAWN}, "delays.type must be none with type async, got weibull; use type"),
        ({**HELD, "hold_batches": 1}, "hold_batches must be null with delays, which say how long"),
        ({**HELD, "order": "completion"}, "order must be admission with delays, which say the"),
        ({**HELD, "delays": {**DRAWN, "time_scale": 0.5}}, "delays.time_scale must be 1, as"),
        (
            {**HELD, "delays": {"type": "constant", "low_s": 0.0, "high_s": 0.0}},
            "delays.high_s must be > 0, as max_staleness updates stand for it, got 0",
        ),
        ({"staleness_threshold": 0.5, "max_staleness": 1}, "are two names of one key"),
        ({"partial_rollout": "yes"}, "partial_rollout must be true or false, got 'yes'"),
        ({"max_staleness": 2000}, "less than or equal to 1024"),
    ],
)
def test_contradictory_keys_are_one_line(keys: dict[str, Any], words: str):
    with pytest.raises(ValidationError) as caught:
        made(**keys)
    (error,) = caught.value.errors()
    assert words in error["msg"]
    assert "\n" not in error["msg"]


def test_drawn_delays_hold_no_fixed_number_of_batches_and_fix_every_version():
    drawn = made(max_staleness=64, **HELD)
    assert (drawn.permits(BATCH), drawn.bound(BATCH), drawn.held) == (520, 64, 0)
    assert drawn.exact
    assert made(type="controlled").exact
    assert not made(type="async").exact


@pytest.mark.parametrize(
    ("verls", "ours"),
    [
        ({"trigger_parameter_sync_step": 1, "staleness_threshold": 0}, {"type": "sync"}),
        ({"trigger_parameter_sync_step": 4}, {"type": "stream"}),
        (
            {"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5},
            {"type": "stale", "sync_every": 4, "max_staleness": 0.5},
        ),
        (
            {
                "trigger_parameter_sync_step": 2,
                "staleness_threshold": 1,
                "partial_rollout": True,
            },
            {"type": "partial", "sync_every": 2, "max_staleness": 1.0},
        ),
        (  # it has an effect only with stale samples
            {"trigger_parameter_sync_step": 4, "partial_rollout": True},
            {"type": "stream"},
        ),
    ],
)
def test_verls_modes_are_these(verls: dict[str, Any], ours: dict[str, Any]):
    assert made(**verls) == made(**ours)


def test_verls_batches_are_mini_batches(tmp_path: Path):
    tree = {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree | {"schedule": {"require_batches": 4}}))
    assert load_config(Config, file, []).learner.num_mini_batches == 4
    with pytest.raises(ConfigError, match=r"require_batches and learner\.num_mini_batches are two"):
        load_config(Config, file, ["learner.num_mini_batches=2"])


def test_a_schedule_overrides_another_by_its_type_alone(tmp_path: Path):
    tree = {"data": {"train": "x"}, "student": {"model": "m"}, "teacher": {"model": "m"}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    for kind in TYPES:
        assert load_config(Config, file, [f"schedule.type={kind}"]).schedule == made(type=kind)
