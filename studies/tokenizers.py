"""What a teacher of another tokenizer teaches: same tokenizer, tokens of the same bytes, chunks.

    python -m studies tokenizers [--limit N]

The student of examples/wordy, one token a character, three seeds. The teacher is the one of that
example, or one made from it here: pieces of up to several characters, and bytes where no piece
holds a character, trained for a few hundred steps on the same right solutions. One thing differs
from run to run:

    same       the example's teacher, whose tokenizer is the student's
    drop       the other teacher, scoring.alignment.unaligned drop
    drop_set   the same, with the divergence renormalised to the ids that have a score
    chunk      the other teacher, unaligned chunk
    shuffled   control: as drop, and the teacher's pieces spell other digits than it was taught

Rows are kept in runs/tokenizers/rows.jsonl: stopped, the study goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from harness.case_rows import append_row, run_commits, say
from harness.run_dirs import summary_of
from harness.tree import ROOT, clean_commit
from studies.grid.trials import (
    KeptRows,
    Trial,
    finished_rows,
    launch,
    row_of_run,
    status_of,
)

Tree = dict[str, Any]
CONFIG = Path("examples/wordy/wordy.yaml")
OUT = Path("runs/tokenizers")
MERGES, SFT_STEPS = 32, 400
SEEDS = (1, 2, 3)
SIZE = {
    "run.max_steps": "24",
    "learner.optimizer.lr": "1.0e-4",
    "objective": "{type: reverse_kl, advantage: rollout}",
    "evaluation": "{problems: 128, samples: 2, before: false}",
    "checkpoint.export_hf": "false",
    "metrics": "{tensorboard: false, trace: false, progress: false}",
}
DROP = "{unaligned: drop}"
SETTINGS: dict[str, dict[str, str]] = {
    "same": {},
    "drop": {"teacher.model": str(OUT / "teacher"), "scoring.alignment": DROP},
    "drop_set": {
        "teacher.model": str(OUT / "teacher"),
        "scoring.alignment": DROP,
        "objective": "{type: sparse_reverse_kl}",
        "support": "{type: topk, k: 16}",
    },
    "chunk": {"teacher.model": str(OUT / "teacher"), "scoring.alignment": "{unaligned: chunk}"},
    "shuffled": {"teacher.model": str(OUT / "shuffled"), "scoring.alignment": DROP},
}
BEFORE = {"evaluation": "{problems: 128, samples: 2}"}
"""Of the first seed: student and teacher are evaluated before the run too."""
SUMMARY = (
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "teacher_accuracy_pct",
    "samples_dropped",
    "wall_s",
)
CURVES = (
    "loss",
    "reverse_kl_nats",
    "aligned_token_fraction",
    "aligned_mass_fraction",
    "response_tokens_mean",
)


def trials() -> list[Trial]:
    """One run for every setting and seed."""
    return [
        Trial(
            setting, "wordy", seed, CONFIG, SIZE | (BEFORE if seed == SEEDS[0] else {}) | overrides
        )
        for seed in SEEDS
        for setting, overrides in SETTINGS.items()
    ]


# ------------------------------------------------------------ the other teacher


def make_teachers(out: Path = OUT) -> None:
    """Write OUT/teacher and OUT/shuffled, unless they are there."""
    if (out / "shuffled").is_dir():
        return
    made = out / "wordy"
    _program("tools.make_wordy", "--out", str(made))
    rows = [json.loads(line) for line in (made / "sft_teacher.jsonl").open(encoding="utf-8")]
    own = AutoTokenizer.from_pretrained(ROOT / "examples/wordy/teacher")
    other = pieces(own, [row["prompt"] + row["response"] for row in rows[:4000]])
    widened(ROOT / "examples/wordy/teacher", own, other, out / "init")
    tree = yaml.safe_load((ROOT / "examples/wordy/sft_teacher.yaml").read_text(encoding="utf-8"))
    tree |= {
        "init": str(out / "init"),
        "train": str(made / "sft_teacher.jsonl"),
        "output": str(out / "teacher"),
    }
    tree["run"] = {"max_steps": SFT_STEPS, "seed": 1, "dir": str(out / "sft")}
    tree["learner"]["optimizer"] |= {"lr": 1e-3, "warmup_steps": 20}
    (out / "sft.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    _program("megatron_opd", "sft", str(out / "sft.yaml"))
    part = out / "shuffled_part"
    shutil.copytree(out / "teacher", part)
    shuffle_digits(part / "tokenizer.json")
    part.rename(out / "shuffled")


def pieces(own: Any, texts: Sequence[str]) -> Any:
    """Return a tokenizer of `own`'s characters, all bytes, and the commonest joins of texts."""
    learnt: Any = Tokenizer(models.BPE())
    trainer: Any = trainers.BpeTrainer(vocab_size=256, show_progress=False)
    learnt.train_from_iterator(texts, trainer)
    merges = json.loads(learnt.to_str())["model"]["merges"][:MERGES]
    words = [word for word, _ in sorted(own.get_vocab().items(), key=lambda pair: pair[1])]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    words += ["".join(pair) for pair in merges]
    bpe = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=[tuple(pair) for pair in merges],
        unk_token=own.unk_token,
        byte_fallback=True,
    )
    made: Any = Tokenizer(bpe)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=own.pad_token,
        eos_token=own.eos_token,
        unk_token=own.unk_token,
        clean_up_tokenization_spaces=False,
    )


def widened(model: Path, own: Any, other: Any, out: Path) -> None:
    """Write the model with rows for the other tokenizer's pieces, made of their characters'."""
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    net.resize_token_embeddings(len(other), mean_resizing=False)
    embedding, head = net.get_input_embeddings().weight, net.get_output_embeddings().weight
    known = own.get_vocab()
    with torch.no_grad():
        for word, i in other.get_vocab().items():
            parts = [known[c] for c in word if c in known]
            if word not in known and not word.startswith("<0x"):
                embedding[i] = embedding[parts].mean(0)
                head[i] = head[parts[0]]
    net.save_pretrained(out)
    other.save_pretrained(out)


def shuffle_digits(file: Path) -> None:
    """Let every piece spell the next digit for each of its digits: a wrong table of bytes."""
    table = str.maketrans("0123456789", "1234567890")
    tree = json.loads(file.read_text(encoding="utf-8"))
    special = {token["content"] for token in tree["added_tokens"]}
    vocab = tree["model"]["vocab"]
    kept = {word for word in vocab if word in special or word.startswith(("<0x", "<unused"))}
    tree["model"]["vocab"] = {
        word if word in kept else word.translate(table): i for word, i in vocab.items()
    }
    tree["model"]["merges"] = [
        [part.translate(table) for part in pair] for pair in tree["model"]["merges"]
    ]
    file.write_text(json.dumps(tree), encoding="utf-8")


def _program(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, cwd=ROOT)


# ------------------------------------------------------------ the runs


def measure(options: Sequence[str] = (), *, out: Path = OUT) -> Tree:
    """Make the teachers, run what is missing, and say what the rows say."""
    parser = argparse.ArgumentParser(prog="python -m studies tokenizers")
    parser.add_argument("--limit", type=int, help="run at most so many of the missing ones")
    asked = parser.parse_args(list(options))
    out.mkdir(parents=True, exist_ok=True)
    make_teachers(out)
    kept = KeptRows(out / "rows.jsonl")
    found = finished_rows(trials(), kept)
    missing = [trial for trial in trials() if trial.name not in found]
    for trial in missing[: asked.limit]:
        commit = clean_commit()
        run_dir = out / trial.name
        code = launch(trial.command(run_dir), out / f"{trial.name}.log")
        status = status_of(summary_of(run_dir), code)
        if status is None:
            raise RuntimeError(f"{trial.name} failed: see {out / trial.name}.log")
        row = row_of_run(trial, run_dir, status, keys=SUMMARY, curves=CURVES)
        row["commit"] = commit
        append_row(kept.path, row)
        found[trial.name] = row
        say(f"{len(found)}/{len(trials())} {trial.name}: {row['summary']}")
        shutil.rmtree(run_dir)
    rows = list(found.values())
    return {
        "config": str(CONFIG),
        "size": SIZE,
        "run_commits": run_commits(rows),
        "missing": [trial.name for trial in trials() if trial.name not in found],
        "settings": {
            name: said([row for row in rows if row["setting"] == name]) for name in SETTINGS
        },
        "rows": rows,
    }


def said(rows: Sequence[Tree]) -> Tree:
    """Return the figures of one setting over its seeds."""
    after = [row["summary"]["student_accuracy_after_pct"] for row in rows]
    first = [row["summary"] for row in rows if row["seed"] == SEEDS[0]]
    return {
        "accuracy_after_pct": after,
        "mean_pct": statistics.fmean(after) if after else None,
        "before_pct": first[0]["student_accuracy_before_pct"] if first else None,
        "teacher_pct": first[0]["teacher_accuracy_pct"] if first else None,
        **{
            f"{name}_{when}": _mean([row["curves"][name][at] for row in rows])
            for name in CURVES[1:4]
            for when, at in (("first", slice(0, 4)), ("last", slice(-4, None)))
        },
    }


def _mean(parts: Sequence[Sequence[float | None]]) -> float | None:
    values = [value for part in parts for value in part if value is not None]
    return statistics.fmean(values) if values else None
