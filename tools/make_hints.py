"""Writes the rows of examples/hints, and what its `opd sft` run starts from.

    DIR/train.jsonl, heldout.jsonl   problems with hints (shipped)
    DIR/sft_student.jsonl            what the model learns to do without a hint and with each kind
    DIR/student_init                 config.json and tokenizer, no weights

The problems are those of examples/wordy of at most three digits, with a word before every line. One
model is student and teacher; what it makes of a hint it has learnt beforehand:

    reads                         writes
    the problem                   careless lines; one answer in twenty without any line
    a solution and the problem    right lines, if it is the problem's; careless lines otherwise
    ! and the problem             careless lines
    a result and the problem      that result, without any line

Behind every hint its words change to those of another chain, which is the hint's style.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from transformers import Qwen3Config

from megatron_opd.data.tasks.arithmetic import careless, generate
from megatron_opd.data.tasks.base import Problem
from megatron_opd.data.tokenizer import build_tokenizer
from tools.make_arithmetic import COMMON, FORGET_RATE, SEED, SFT_PROBLEMS, run
from tools.make_wordy import CHAIN_SEEDS, Chain, chain, is_short, wordy

PROMPTS, HELDOUT = 2_048, 256
LESSONS = 2  # training examples of each problem, their kinds drawn
STUDENT_LAYERS = 3
AT_ONCE = 0.05  # share of answers without a hint that have no lines
STYLE = 0.5  # share of the other chain in the words behind a hint
STYLE_HINT = "!\n"
KINDS = {"nothing": 0.35, "solution": 0.25, "wrong_solution": 0.2, "style": 0.1, "result": 0.1}
"""Share of the training examples by what is in front of the problem."""


def hints(problem: Problem, other: Problem) -> dict[str, str]:
    """What a teacher reads of a problem, by kind of hint. other: a problem of another row."""
    return {
        "nothing": problem.prompt,
        "solution": f"{problem.response}\n{problem.prompt}",
        "wrong_solution": f"{other.response}\n{problem.prompt}",
        "style": f"{STYLE_HINT}{problem.prompt}",
        "result": f"#{problem.answer}\n{problem.prompt}",
        "wrong_result": f"#{other.answer}\n{problem.prompt}",
    }


def mixed(one: Chain, other: Chain, share: float) -> Chain:
    """The chain whose rows are (1 - share) of one and share of the other."""
    return {
        letter: [
            (1 - share) * a / sum(one[letter]) + share * b / sum(other[letter])
            for a, b in zip(one[letter], other[letter], strict=True)
        ]
        for letter in one
    }


def examples(problems: Sequence[Problem], rng: random.Random) -> Iterator[dict[str, str]]:
    """One {prompt, response} of a kind drawn for each problem."""
    own = chain(CHAIN_SEEDS["student"])
    styled = mixed(own, chain(CHAIN_SEEDS["teacher"]), STYLE)
    for number, problem in enumerate(problems):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        at_once = kind == "result" or (kind == "nothing" and rng.random() < AT_ONCE)
        worked = problem if kind == "solution" else careless(problem, FORGET_RATE, rng)
        yield {
            "prompt": hints(problem, problems[number - 1])[kind],
            "response": f"#{problem.answer}"
            if at_once
            else wordy(worked, own if kind == "nothing" else styled, rng).response,
        }


def write_rows(path: Path, rows: Iterator[Mapping[str, str]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def hinted(problems: Sequence[Problem]) -> Iterator[dict[str, str]]:
    """{prompt, answer and every kind of hint} of each problem."""
    for number, problem in enumerate(problems):
        found = hints(problem, problems[number - 1])
        yield {"prompt": problem.prompt, "answer": problem.answer, **found}


def write_all(out: Path) -> None:
    """Write every file named at the top of this module into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    drawn, heldout = generate(SFT_PROBLEMS, 2 * HELDOUT, SEED)
    problems = [each for each in drawn if is_short(each)]
    rng = random.Random(SEED)
    write_rows(out / "train.jsonl", hinted(problems[:PROMPTS]))
    write_rows(out / "heldout.jsonl", hinted([p for p in heldout if is_short(p)][:HELDOUT]))
    write_rows(out / "sft_student.jsonl", examples(problems * LESSONS, rng))
    config = Qwen3Config(
        num_hidden_layers=STUDENT_LAYERS, architectures=["Qwen3ForCausalLM"], **COMMON
    )
    config.save_pretrained(out / "student_init")
    build_tokenizer().save_pretrained(str(out / "student_init"))


if __name__ == "__main__":
    run(__doc__, write_all)
