"""What is run beside what: one setting for both systems, and their configurations.

Invariant: student, teacher, prompts and their order, responses a step and tokens of each, learning
rate, AdamW's numbers, clipping and the sampling distribution are the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

System = Literal["opd", "trl"]
Tree = dict[str, Any]

PROMPTS = Path("examples/smollm2/train.jsonl")
BATCH, TOKENS, SEED = 16, 48, 7
LEARNING_RATE = 1e-4
NO_LEARNING = 1e-12
"""Moves no float32 weight: the control. A learning rate of 0 is refused here."""
CORES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """One run. updates, of which the first `warm_up` and the last `cool_down` are not timed.

    The last ones are left out because nothing is sampled beside them in an asynchronous run.
    """

    system: System
    dtype: Literal["float32", "bfloat16"]
    learning_rate: float
    repetition: int
    updates: int
    warm_up: int
    cool_down: int

    @property
    def name(self) -> str:
        """Returns what the row is called."""
        kind = "control" if self.learning_rate == NO_LEARNING else f"repetition {self.repetition}"
        return f"{self.system} {self.dtype} {kind}"

    def asked(self) -> Tree:
        """Return what the row's fingerprint is made of."""
        configuration = opd_config if self.system == "opd" else trl_arguments
        models = {name: Path(name) for name in ("student", "teacher")}
        return asdict(self) | {"configuration": configuration(self, models, Path("run"))}


def cases(updates: int, repetitions: int) -> list[Case]:
    """Return all runs in their order: the systems in turn, the one that begins too."""
    timed = {"updates": updates, "warm_up": 2, "cool_down": 2}
    found: list[Case] = []
    for repetition in range(repetitions):
        for dtype in ("float32", "bfloat16"):
            pair: tuple[System, System] = ("opd", "trl")
            for system in pair if repetition % 2 == 0 else pair[::-1]:
                found.append(Case(system, dtype, LEARNING_RATE, repetition, **timed))
    controls = [Case(system, "float32", NO_LEARNING, 0, **timed) for system in ("trl", "opd")]
    return [*found, *controls]


def trl_arguments(case: Case, models: Mapping[str, Path], own: Path) -> Tree:
    """Return the case file of trl_program.py.

    One micro-batch a step and no recomputation is the fastest of TRL's settings on these cores.
    """
    return {
        "prompts": str(PROMPTS),
        "student": str(models["student"]),
        "teacher": str(models["teacher"]),
        "dtype": case.dtype,
        "checkpointing": False,
        "microbatch": BATCH,
        "batch": BATCH,
        "tokens": TOKENS,
        "updates": case.updates,
        "learning_rate": case.learning_rate,
        "seed": SEED,
        "out": str(own / "steps.jsonl"),
    }


def opd_config(case: Case, models: Mapping[str, Path], own: Path) -> Tree:
    """Return the configuration of `opd run`.

    The student's server loads no tokenizer: no end token is ever sampled here, nor a stop string
    asked for. Weights travel in pieces of 16 MiB, of which learner and server hold one each.
    """
    server = {"dtype": case.dtype, "context_length": 192}
    return {
        "run": {"dir": str(own / "run"), "max_steps": case.updates, "seed": SEED},
        "data": {
            "train": str(PROMPTS),
            "task": "none",
            "chat_template": True,
            "max_prompt_tokens": 128,
            "shuffle": False,
        },
        "student": server
        | {
            "model": str(models["student"]),
            "max_total_tokens": 3584,
            "max_running_requests": 2 * BATCH,
            "extra_args": ["--skip-tokenizer-init"],
        },
        "teacher": server
        | {
            "model": str(models["teacher"]),
            "max_total_tokens": 1024,
            "max_running_requests": 4,
        },
        "rollout": {"temperature": 1.0, "max_new_tokens": TOKENS, "concurrency": 2 * BATCH},
        "scoring": {"concurrency": 4},
        "buffer": {"batch_size": BATCH},
        "objective": {"type": "reverse_kl"},
        "learner": {
            "dtype": case.dtype,
            "threads": 1,
            "max_tokens_per_microbatch": 256,
            "optimizer": {"lr": case.learning_rate, "beta2": 0.95, "clip_grad": 1.0},
        },
        "weight_sync": {"bucket_bytes": 2**24},
        "evaluation": {"problems": 0},
        "checkpoint": {"every_minutes": 0, "export_hf": False},
        "metrics": {"tensorboard": False, "rollouts": 0, "trace": False},
    }
