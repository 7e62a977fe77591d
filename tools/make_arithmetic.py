"""Writes what the two `opd sft` runs of examples/arithmetic start from.

    DIR/train.jsonl, heldout.jsonl   prompts for distillation and evaluation (shipped)
    DIR/sft_teacher.jsonl            right solutions
    DIR/sft_student.jsonl            the same problems, careless solutions (most carries forgotten)
    DIR/teacher_init, student_init   config.json and tokenizer, no weights

One draw of problems without replacement feeds all four files, so no held-out problem is in any of
the others.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from megatron_opd.data.tasks.arithmetic import careless, generate
from megatron_opd.data.tasks.base import Problem
from megatron_opd.data.tokenizer import VOCAB_SIZE, build_tokenizer

SEED = 2026
SFT_PROBLEMS, TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 24_000, 4_096, 256
FORGET_RATE = 0.85

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}


def model_configs() -> dict[str, PretrainedConfig]:
    """teacher: dense Qwen3, 0.6 M parameters; student: Qwen3-MoE, 0.5 M, 4 experts, top-2."""
    teacher = Qwen3Config(num_hidden_layers=4, architectures=["Qwen3ForCausalLM"], **COMMON)
    student = Qwen3MoeConfig(
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.0,
        architectures=["Qwen3MoeForCausalLM"],
        **COMMON,
    )
    return {"teacher": teacher, "student": student}


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """One {prompt, answer, response} a line."""
    lines = (json.dumps(asdict(problem)) + "\n" for problem in problems)
    path.write_text("".join(lines), encoding="utf-8")


def write_all(out: Path) -> None:
    """Write every file named at the top of this module into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    problems, heldout = generate(SFT_PROBLEMS, HELDOUT_PROBLEMS, SEED)
    rng = random.Random(SEED)
    write_problems(out / "train.jsonl", problems[:TRAIN_PROBLEMS])
    write_problems(out / "heldout.jsonl", heldout)
    write_problems(out / "sft_teacher.jsonl", problems)
    write_problems(out / "sft_student.jsonl", [careless(p, FORGET_RATE, rng) for p in problems])
    tokenizer = build_tokenizer()
    for role, config in model_configs().items():
        config.save_pretrained(out / f"{role}_init")
        tokenizer.save_pretrained(str(out / f"{role}_init"))


def run(doc: str | None, write: Callable[[Path], None]) -> None:
    """Write everything into --out. doc: a module's, whose first line --help shows."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    write(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    run(__doc__, write_all)
