"""How a schedule is told, in this project's words and in verl's."""

from typing import Any

import pytest

from megatron_opd.cli.tables.schedule_words import in_verls_words, schedule_in_words
from megatron_opd.config.schedule import ScheduleConfig


def test_the_bound_and_the_permits_are_said():
    said = schedule_in_words(ScheduleConfig(type="stale", in_flight="keep"), 64)
    assert said == (
        "stale: tokens at most 5 updates old, by 384 permits = (1 + 0.5) * 4 * 64; a weight sync "
        "every 4 updates; a weight sync waits for responses in flight; order of admission"
    )
    held = schedule_in_words(ScheduleConfig.model_validate({"type": "controlled"}), 8)
    assert held.startswith("controlled: tokens at most 1 update old, by 16 permits")
    assert held.endswith("order of admission, trained on 1 batches later")
    keys = {"type": "controlled", "delays": {"type": "weibull"}}
    drawn = schedule_in_words(ScheduleConfig.model_validate(keys), 8)
    assert drawn.endswith("admission, how much later is drawn for each batch (weibull)")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"type": "partial"},
            "trigger_parameter_sync_step 4, staleness_threshold 0.5, partial_rollout true",
        ),
        (
            {"type": "sync"},
            "trigger_parameter_sync_step 1, staleness_threshold 0, partial_rollout false; "
            "AsyncOPD's tau = 0",
        ),
        ({"type": "controlled"}, "nothing in verl is like it (hold_batches)"),
        (
            {"type": "controlled", "delays": {"type": "weibull"}},
            "nothing in verl is like it (delays)",
        ),
        ({"order": "completion"}, "nothing in verl is like it (completion)"),
        ({"in_flight": "abort"}, "nothing in verl is like it (in_flight: abort)"),
    ],
)
def test_verls_keys_that_are_the_same(keys: dict[str, Any], words: str):
    assert in_verls_words(ScheduleConfig.model_validate(keys)) == words
