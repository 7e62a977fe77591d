"""Computes log-probs of given ids by a forward pass that is not a server's.

`python -m megatron_opd.learner.reference MODEL DTYPE TEMPERATURE`, with a JSON list of {input_ids,
runs, offsets, ids} on standard input; see sglang_bridge.protocol.ScoreRequest. Prints one line of
JSON: {"by": what made the pass, "logp": a list for each}, or {"by": null, "why": ...}.

transformers is asked first, then the learner's own model: it has other code, and knows more kinds
of checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_bridge.errors import one_line
from sglang_bridge.protocol import row_positions

Passages = Sequence[dict[str, Any]]


def by_transformers(path: Path, dtype: torch.dtype, passages: Passages) -> list[torch.Tensor]:
    """Return float [S, V] of each passage. ValueError: tensors of the model are missing."""
    from transformers import AutoModelForCausalLM

    from megatron_opd.checkpoint.hf_formats import format_of
    from megatron_opd.learner.verify import of_quantised

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    if format_of(path) is not None:
        model, found = of_quantised(path, dtype)
    else:
        model, found = load(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    for key in ("missing_keys", "mismatched_keys"):
        if found.get(key):
            # such parameters are random
            raise ValueError(f"{path}: {key.replace('_', ' ')} {sorted(map(str, found[key]))[0]}")
    with torch.no_grad():
        return [model(torch.tensor([each["input_ids"]])).logits[0] for each in passages]


def by_learner(path: Path, dtype: torch.dtype, passages: Passages) -> list[torch.Tensor]:
    """Return float [S, V] of each passage, by the learner's model on this process alone."""
    from megatron_opd.checkpoint.convert import source_of
    from megatron_opd.learner.verify import learner_logits
    from megatron_opd.models.spec import read_model_spec

    name = "float32" if dtype == torch.float32 else "bfloat16"
    spec = read_model_spec(path)
    sequences = [torch.tensor([each["input_ids"]]) for each in passages]
    return learner_logits(source_of(path, spec, None), spec, sequences, name)


PASSES: dict[str, Callable[[Path, torch.dtype, Passages], list[torch.Tensor]]] = {
    "transformers": by_transformers,
    "the learner's model": by_learner,
}


def log_probs(logits_SV: torch.Tensor, passage: dict[str, Any], temperature: float) -> list[float]:
    """Return the log-prob of each of a passage's ids, where ScoreRequest places it."""
    position_T = torch.from_numpy(row_positions(passage["runs"]))
    rows_TV = (logits_SV[position_T].double() / temperature).log_softmax(-1)
    counts_T = torch.tensor(passage["offsets"]).diff()
    row_N = torch.arange(len(rows_TV)).repeat_interleave(counts_T)
    return rows_TV[row_N, torch.tensor(passage["ids"])].tolist()


def main() -> int:
    """Answer with the first pass that works, or with why each did not."""
    path, dtype, temperature = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    passages: Passages = json.load(sys.stdin)
    why: list[str] = []
    answer: dict[str, Any] = {"by": None}
    for name, run in PASSES.items():
        try:
            logits = run(path, getattr(torch, dtype), passages)
        except Exception as error:  # noqa: BLE001  (whatever a model's code raises, told below)
            why.append(one_line(f"{name}: {error or type(error).__name__}", 200))
            continue
        pairs = zip(logits, passages, strict=True)
        answer = {"by": name, "logp": [log_probs(each, p, temperature) for each, p in pairs]}
        break
    sys.stdout.write("\n" + json.dumps(answer | {"why": "; ".join(why)}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
