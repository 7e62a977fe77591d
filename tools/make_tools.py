"""Writes what the two `opd sft` runs of examples/tools start from.

    DIR/train.jsonl, heldout.jsonl   products for distillation and evaluation (shipped)
    DIR/sft_teacher.jsonl            conversations in which the calculator is used well
    DIR/sft_student.jsonl            the same products, the calculator used badly
    DIR/teacher_init, student_init   config.json and tokenizer, no weights

A product has a factor of three digits and one of two: too much for models of this size to compute
without a tool. In the student's conversations an answer is guessed without a call (GUESSES), or the
call has two digits swapped or another operation (WRONG_CALLS); its answer is then what the tool
said. In a share of both files there is no tool, and the answer is guessed.

One draw of products without replacement feeds all four files, so no held-out product is in any of
the others.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from megatron_opd.environments.calculator import CalculatorEnvironment, calculated
from tools.make_arithmetic import COMMON, run

SEED = 2031
SFT_PRODUCTS, TRAIN_PRODUCTS, HELDOUT_PRODUCTS = 8_000, 4_096, 256
WITHOUT_TOOL = 0.1
GUESSES, WRONG_CALLS = 0.25, 0.6
LAYERS = {"teacher": 4, "student": 3}
VOCAB_SIZE, LEARNT_FROM = 320, 200
END, CONTROL = "<|im_end|>", ("<|im_start|>", "<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).parents[1] / "examples" / "tools" / "chat_template.jinja"

Row = dict[str, Any]
Answer = Callable[[int, int, random.Random], list[Row]]


def prompt(left: int, right: int) -> Row:
    """A product as it is asked."""
    return {"prompt": f"{left}*{right}=", "answer": str(left * right)}


def called(expression: str) -> list[Row]:
    """A call, what the calculator answers, and that as the result."""
    call = {"name": "calculate", "arguments": {"expression": expression}}
    result = calculated(expression)
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "name": "calculate", "content": result},
        {"role": "assistant", "content": f"#{result}"},
    ]


def guessed(left: int, right: int, rng: random.Random) -> list[Row]:
    """A result whose first digit is right."""
    result = str(left * right)
    rest = "".join(rng.choices(string.digits, k=len(result) - 1))
    return [{"role": "assistant", "content": f"#{result[0]}{rest}"}]


def well(left: int, right: int, rng: random.Random) -> list[Row]:
    """What the teacher learns."""
    return called(f"{left}*{right}")


def badly(left: int, right: int, rng: random.Random) -> list[Row]:
    """What the student learns."""
    if rng.random() < GUESSES:
        return guessed(left, right, rng)
    if rng.random() >= WRONG_CALLS:
        return called(f"{left}*{right}")
    if rng.random() < 0.5:
        return called(f"{left}{rng.choice('+-')}{right}")
    digits = str(left)
    return called(f"{digits[0]}{digits[2]}{digits[1]}*{right}")


def conversations(
    products: Iterable[tuple[int, int]], answer: Answer, rng: random.Random
) -> list[Row]:
    """A conversation about each product."""
    tools = CalculatorEnvironment().tools
    rows: list[Row] = []
    for left, right in products:
        plain = rng.random() < WITHOUT_TOOL
        answers = (guessed if plain else answer)(left, right, rng)
        asked = {"role": "user", "content": prompt(left, right)["prompt"]}
        rows.append({"messages": [asked, *answers], "tools": [] if plain else [*tools]})
    return rows


def products(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Different products of a factor of three digits, all different, and one of two."""
    every = [
        (left, right)
        for left in range(100, 1000)
        for right in range(10, 100)
        if len(set(str(left))) == 3
    ]
    return rng.sample(every, count)


def build_tokenizer(rows: Sequence[Row]) -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a digit, and what else is often written in few tokens.

    rows: conversations of which the pieces are learnt.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = ["<pad>", END, "<unk>", *CONTROL]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    texts = (
        str(fast.apply_chat_template(row["messages"], tools=row["tools"] or None, tokenize=False))
        for row in rows
    )
    pieces = (piece for text in texts for piece in _between(text, names))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=names,
        initial_alphabet=["\n", *(chr(code) for code in range(32, 127))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    made.chat_template = fast.chat_template
    return made


def _between(text: str, names: Sequence[str]) -> list[str]:
    for name in names:
        text = text.replace(name, "\0")
    return [piece for piece in text.split("\0") if piece]


def model_configs(vocab_size: int) -> dict[str, PretrainedConfig]:
    """Dense Qwen3 of a few layers, by role."""
    common: Row = {**COMMON, "vocab_size": vocab_size}
    return {
        role: Qwen3Config(num_hidden_layers=layers, architectures=["Qwen3ForCausalLM"], **common)
        for role, layers in LAYERS.items()
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_all(out: Path) -> None:
    """Write every file named at the top of this module into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    drawn = products(SFT_PRODUCTS + HELDOUT_PRODUCTS, rng)
    learnt, heldout = drawn[:SFT_PRODUCTS], drawn[SFT_PRODUCTS:]
    write_rows(out / "train.jsonl", (prompt(*each) for each in learnt[:TRAIN_PRODUCTS]))
    write_rows(out / "heldout.jsonl", (prompt(*each) for each in heldout))
    files = {
        role: conversations(learnt, answer, rng)
        for role, answer in (("teacher", well), ("student", badly))
    }
    tokenizer = build_tokenizer(files["student"][:LEARNT_FROM])
    for role, config in model_configs(len(tokenizer)).items():
        write_rows(out / f"sft_{role}.jsonl", files[role])
        config.save_pretrained(out / f"{role}_init")
        tokenizer.save_pretrained(str(out / f"{role}_init"))


if __name__ == "__main__":
    run(__doc__, write_all)
