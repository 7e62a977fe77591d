"""Distils with TRL's DistillationTrainer, and writes what every step took.

    python -P benchmarks/beside_trl/trl_program.py CASE.json

Runs in TRL's own environment, so it imports nothing of this project. CASE.json: {prompts, student,
teacher, dtype, checkpointing, microbatch, batch, tokens, updates, learning_rate, seed, out};
`out` receives one line of JSON a step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class Timed(DistillationTrainer):
    """Counts the tokens that it generates and the seconds that this takes."""

    prompt_tokens = response_tokens = 0
    generate_s = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        began = time.perf_counter()
        responses = super()._generate_single_turn(prompt_ids, *rest, **named)
        self.generate_s += time.perf_counter() - began
        self.prompt_tokens += sum(map(len, prompt_ids))
        self.response_tokens += sum(map(len, responses))
        return responses


class Steps(TrainerCallback):
    """Writes a row a step, once its loss is known; the sums in it are since the beginning."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.trainer = file, None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Write the row of the step that has ended."""
        if "loss" not in logs:
            return  # the summary of the whole training
        trainer = self.trainer
        row = {
            "update": state.global_step - 1,
            "at_s": time.monotonic(),
            "loss": logs["loss"],
            "prompt_tokens": trainer.prompt_tokens,
            "response_tokens": trainer.response_tokens,
            "generate_s": trainer.generate_s,
        }
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def distil(case: dict[str, Any], steps: Steps) -> None:
    """Train for `updates` steps."""
    rows = [json.loads(line) for line in Path(case["prompts"]).read_text("utf-8").splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    bfloat16 = case["dtype"] == "bfloat16"
    arguments = DistillationConfig(
        output_dir=str(Path(case["out"]).with_name("trl")),
        max_steps=case["updates"],
        per_device_train_batch_size=case["microbatch"],
        gradient_accumulation_steps=case["batch"] // case["microbatch"],
        gradient_checkpointing=case["checkpointing"],
        max_completion_length=case["tokens"],
        temperature=1.0,
        beta=1.0,  # reverse KL
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=bfloat16,
        teacher_model_init_kwargs={"dtype": case["dtype"]},
        shuffle_dataset=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=case["seed"],
    )
    trainer = Timed(
        model=case["student"],
        teacher_model=case["teacher"],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[steps],
    )
    steps.trainer = trainer
    trainer.train()


def main() -> None:
    """Entry point."""
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(case["out"]).open("w", encoding="utf-8") as file:
        distil(case, Steps(file))


if __name__ == "__main__":
    main()
