"""`opd run` on real engines with everything that chooses what is learnt from, and from whom."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Sections
from tests.e2e.runs import START_TIMEOUT_S, Running, write_config

pytestmark = pytest.mark.e2e

GROUP, GROUPS = 2, 4
KINDS = ({"kl": 0}, {"own": 0}, {"own": 0.5, "kl": 2})
"""Weights of the prompts, in turn: rewards alone, the teacher alone, both."""


def test_groups_lengths_weights_and_a_curriculum_in_one_run(
    inputs: Path, tmp_path: Path, shared: Sections, start: Callable[..., Running]
):
    rows = [{"prompt": f"{i}+{i}=", "answer": "x"} | KINDS[i % 3] for i in range(9)]
    for row in rows:
        if row.get("own") == 0:
            del row["answer"]  # nobody asks for it
    train = tmp_path / "rows.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    terms = [{"objective": {"type": "reverse_kl"}}, {"objective": {"type": "grpo"}}]
    running = start(
        write_config(
            inputs,
            tmp_path,
            student={**shared["student"], "model": str(inputs / "student")},
            teacher={**shared["teacher"], "model": str(inputs / "teacher")},
            data={
                "train": str(train),
                "heldout": None,
                "task": "tests.support.verdicts:is_of_even_length",
                "reward_weight_key": "own",
                "teacher_weight_key": "kl",
                "curriculum": {"type": "pass_rate", "low": 0.4, "high": 0.6, "outside": 0.0},
            },
            evaluation={"problems": 0},
            schedule={"type": "sync"},  # what is sampled is the same every time
            rollout={"max_new_tokens": 24, "group_size": GROUP},
            buffer={"batch_size": GROUP * GROUPS},
            support={"type": "path"},
            objective={"type": "mixture", "terms": terms},
            selection={
                "overlong": {"type": "soft_penalty", "cache": 8, "scale": 0.5},
                "groups": {"type": "reward_spread", "most_in_a_row": 8, "exhausted": "keep"},
            },
            checkpoint={"export_hf": False, "every_minutes": 0},
            metrics={"tensorboard": False, "trace": False},
        )
    )
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    summary, last = done.summary, done.rows[-1]
    assert summary["samples_consumed"] == sum(row["num_samples"] for row in done.rows)
    dropped = summary["samples_dropped"]
    assert set(dropped) <= {"all_right", "all_wrong"}, "nothing else was dropped"
    thrown = summary["groups_all_right"] + summary["groups_all_wrong"]
    assert thrown * GROUP == sum(dropped.values()) > 0
    assert last["groups_all_right"] + last["groups_all_wrong"] <= thrown
    samples = summary["samples_consumed"]
    assert 0 < summary["samples_without_teacher"] < samples
    # most responses of random weights are cut, at the whole penalty
    assert -0.5 <= summary["overlong_penalty_mean"] < -0.25
    assert last["curriculum_skipped"] > 0
    assert 0 < last["curriculum_rated_fraction"] <= 2 / 3, "a third has no answer, so no rate"
    for row in done.rows:
        assert row["grad_norm"] > 0
        assert row["num_samples"] == GROUP * GROUPS
