"""A student of byte-level BPE learns from a teacher of pieces with byte fallback, on real engines.

Both are random. The student writes letters, whole and halved characters, and tokens of two letters,
of which the teacher has others. The loss is renormalised to what has a score: with another one a
student that is this far away would leave for what has none (docs/tokenizers.md).
"""

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.runs import START_TIMEOUT_S, Running, write_config, write_prompts
from tests.support.two_tokenizers import END, byte_level, tiny_model, with_fallback

pytestmark = pytest.mark.e2e

UPDATES = 6
LETTERS = "abcd"
PAIRS = tuple("".join(pair) for pair in product(LETTERS, repeat=2))


def words() -> list[str]:
    rng = random.Random(3)
    found = ["".join(rng.choices(LETTERS, k=rng.randint(1, 4))) for _ in range(200)]
    return [*found, "é", *"0123456789+="]


def test_a_teacher_of_another_tokenizer_is_learnt_from(
    tmp_path: Path, start: Callable[..., Running]
):
    ours, theirs = byte_level(36, prefix=False, of=words()), with_fallback(LETTERS, PAIRS[:12])
    tiny_model(tmp_path / "student", ours, seed=1)
    tiny_model(tmp_path / "teacher", theirs, seed=2)
    write_prompts(tmp_path)
    config = write_config(
        tmp_path,
        tmp_path,
        run={"max_steps": UPDATES},
        scoring={"alignment": {"unaligned": "drop"}, "guard": "refuse"},
        buffer={"batch_size": 16},
        rollout={"concurrency": 32},
        objective={"type": "sparse_reverse_kl"},
        support={"type": "topk", "k": 36},
        learner={"optimizer": {"lr": 0.004}},
        metrics={"rollouts": 2},
    )
    running = start(config)
    running.wait_until(running.has_updated)
    done = running.finish(START_TIMEOUT_S)
    assert done.code == 0, done.output
    # of what has a score: the renormalised divergence
    losses = [row["loss"] / row["aligned_token_fraction"] for row in done.rows]
    assert losses[-1] < 0.8 * losses[0], losses
    for row in done.rows:
        assert 0.1 < row["aligned_token_fraction"] < 0.98
        assert 0.05 < row["aligned_mass_fraction"] <= row["aligned_token_fraction"]
    checks = done.summary["teacher_checks"]
    assert checks[0].startswith("teacher: scores agree with sampling to ")
    assert any("of them that have a score" in line for line in checks), checks
    assert 0 <= done.summary["teacher_accuracy_pct"] <= 100
    lines = (done.run_dir / "rollouts.jsonl").read_text().splitlines()
    scores = [json.loads(line)["teacher_logp"] for line in lines]
    assert any(None in row for row in scores if row)
    assert any(each is not None for row in scores if row for each in row)
    assert END not in done.output
