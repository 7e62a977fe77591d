"""Writes the prompts of examples/wordy, and what its two `opd sft` runs start from.

    DIR/train.jsonl, heldout.jsonl   prompts for distillation and evaluation (shipped)
    DIR/sft_teacher.jsonl            right solutions, a word of the teacher's before each line
    DIR/sft_student.jsonl            careless solutions, a word of the student's before each line
    DIR/teacher_init, student_init   config.json and tokenizer, no weights

The models learn on the problems that those of examples/arithmetic do (tools/make_arithmetic.py), of
two to four digits; the prompts have at most three, which makes runs a quarter shorter, and none of
those to evaluate on is in either model's training data. A word has two letters, each drawn from a
chain that looks at the letter before it. Teacher and student have chains of their own, so that a
fifth of all tokens is uncertain and the student's distribution moves far while it learns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from transformers import Qwen3Config

from megatron_opd.data.tasks.arithmetic import careless, generate
from megatron_opd.data.tasks.base import Problem
from megatron_opd.data.tokenizer import build_tokenizer
from tools.make_arithmetic import (
    COMMON,
    FORGET_RATE,
    HELDOUT_PROBLEMS,
    SEED,
    SFT_PROBLEMS,
    model_configs,
    run,
    write_problems,
)

LETTERS_OF_A_WORD = 2
CONCENTRATION = 0.5  # of the Dirichlet rows of a chain: about 2.3 nats a letter
STUDENT_LAYERS = 2
PROMPT_DIGITS = 3  # at most, of the larger operand
PROMPTS, HELDOUT = 4_096, 512
HELDOUT_SEED = 2027
CHAIN_SEEDS = {"teacher": 1, "student": 2}

Chain = dict[str, list[float]]
"""Weights of the next letter by the letter before it; a word's first looks at the last word's end,
the first of all at "a"."""


def chain(seed: int) -> Chain:
    """A chain whose rows are drawn from a symmetric Dirichlet distribution."""
    rng = random.Random(seed)
    return {
        letter: [rng.gammavariate(CONCENTRATION, 1.0) for _ in ascii_lowercase]
        for letter in ascii_lowercase
    }


def wordy(problem: Problem, letters: Chain, rng: random.Random) -> Problem:
    """The same problem with a word before each line of its solution but the last."""
    *lines, result = problem.response.split("\n")
    before, written = "a", []
    for line in lines:
        word = ""
        for _ in range(LETTERS_OF_A_WORD):
            before = rng.choices(ascii_lowercase, letters[before])[0]
            word += before
        written.append(word + line)
    return replace(problem, response="\n".join([*written, result]))


def is_short(problem: Problem) -> bool:
    """Whether both operands have few enough digits for a prompt."""
    return all(len(operand) <= PROMPT_DIGITS for operand in re.findall(r"\d+", problem.prompt))


def unseen(problems: Sequence[Problem]) -> list[Problem]:
    """Short problems that are not among `problems`."""
    known = {problem.prompt for problem in problems}
    drawn, _ = generate(SFT_PROBLEMS, 0, HELDOUT_SEED)
    new = [each for each in drawn if is_short(each) and each.prompt not in known]
    return new[:HELDOUT]


def write_all(out: Path) -> None:
    """Write every file named at the top of this module into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    problems, _ = generate(SFT_PROBLEMS, HELDOUT_PROBLEMS, SEED)
    write_problems(out / "train.jsonl", [p for p in problems if is_short(p)][:PROMPTS])
    write_problems(out / "heldout.jsonl", unseen(problems))
    rng = random.Random(SEED)
    solutions: dict[str, Callable[[Problem], Problem]] = {
        "teacher": lambda problem: problem,
        "student": lambda problem: careless(problem, FORGET_RATE, rng),
    }
    student = Qwen3Config(
        num_hidden_layers=STUDENT_LAYERS, architectures=["Qwen3ForCausalLM"], **COMMON
    )
    configs = {"teacher": model_configs()["teacher"], "student": student}
    tokenizer = build_tokenizer()
    for role, solve in solutions.items():
        letters = chain(CHAIN_SEEDS[role])
        written = [wordy(solve(problem), letters, rng) for problem in problems]
        write_problems(out / f"sft_{role}.jsonl", written)
        configs[role].save_pretrained(out / f"{role}_init")
        tokenizer.save_pretrained(str(out / f"{role}_init"))


if __name__ == "__main__":
    run(__doc__, write_all)
