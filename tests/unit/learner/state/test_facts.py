"""What a learner says of its own checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_opd.learner.state.facts import read_facts


@pytest.mark.parametrize("key", ["updates", "step", "world_size"])
@pytest.mark.parametrize("value", ["2", None, -1, 2.0])
def test_what_a_learner_says_of_itself_are_counts(tmp_path: Path, key: str, value: Any) -> None:
    facts = {"format": 2, "updates": 2, "step": 2, "world_size": 1, "parallel": {}, "dtype": "x"}
    (tmp_path / "state.json").write_text(json.dumps(facts))
    assert read_facts(tmp_path).updates == 2
    (tmp_path / "state.json").write_text(json.dumps(facts | {key: value}))
    least = 1 if key == "world_size" else 0
    with pytest.raises(ValueError, match=f"{key} of state.json must be >= {least}, got "):
        read_facts(tmp_path)
