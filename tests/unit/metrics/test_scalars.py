"""Numbers of rows by the names that sinks show."""

import math

from megatron_opd.metrics.scalars import evaluation_scalars, scalars

EVALUATED = {
    "update": 20,
    "set": "gsm8k",
    "version_min": 18,
    "version_max": 20,
    "accuracy_pct": 62.5,
    "pass_at_k": {1: 60.0, "4": 75, 8: None},
    "stderr_pct": math.nan,
}


def test_only_finite_numbers_are_shown():
    row = {"loss": 0.5, "reward_mean": None, "grad_norm": math.inf, "servers": {"a": 1}, "x": "y"}
    assert scalars(row, "opd") == {"train/loss": 0.5}
    assert scalars(row, "verl") == {"actor/loss": 0.5}


def test_an_evaluated_set_has_its_own_tags():
    assert evaluation_scalars(EVALUATED) == {
        "eval/gsm8k/version_min": 18,
        "eval/gsm8k/version_max": 20,
        "eval/gsm8k/accuracy_pct": 62.5,
        "eval/gsm8k/pass_at_k/1": 60,
        "eval/gsm8k/pass_at_k/4": 75,
    }
