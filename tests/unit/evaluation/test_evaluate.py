"""What `opd eval` asks a checkpoint."""

import json
from pathlib import Path
from typing import Any

from megatron_opd.config.schema import Config
from megatron_opd.evaluation.evaluate import questions_of


def test_held_out_problems_end_at_the_same_strings_as_rollouts(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "ends": "#"}, {"prompt": "1+2=", "answer": "3"}]
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config["data"] |= {"train": str(held_out), "heldout": str(held_out), "stop_key": "ends"}
    config["rollout"]["stop"] = ["!"]
    config["evaluation"]["problems"] = 2
    (found,) = questions_of(Config.model_validate(config)).sets.values()
    assert found.plan.stop == ("!",)
    assert [prompt.stop for prompt in found.prompts] == [("#",), ()]
