"""The shipped configurations that learn from rewards are valid, and so are their rows."""

from collections import Counter

import pytest

from examples.rewards.mixed_rows import rows
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "rewards"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_a_configuration_is_valid(name: str):
    config = load_config(Config, EXAMPLES / name)
    assert config.estimator.reads_reward
    assert config.estimator.distils == (name == "mixed.yaml")


def test_rows_of_every_kind_are_mixed():
    kinds = Counter((row["reward_weight"] > 0, row["teacher_weight"] > 0) for row in rows())
    assert set(kinds) == {(True, False), (False, True), (True, True)}
    assert min(kinds.values()) > 400, kinds
