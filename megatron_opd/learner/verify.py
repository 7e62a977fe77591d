"""Checks that two checkpoints give the same logits, one of Megatron and one of transformers.

python -m megatron_opd.learner.verify MEGATRON HF

It compares the learner's model in float32, with the Megatron checkpoint's weights, with
transformers' model of the other. Both are whole in memory, on this one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_opd.checkpoint.convert import load_weights
from megatron_opd.checkpoint.hf_reader import converted_dtype
from megatron_opd.checkpoint.megatron_reader import MegatronSource
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.attention import Packing
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.model import build_model
from megatron_opd.learner.world import init_world
from megatron_opd.models.shards import TensorSource
from megatron_opd.models.spec import ModelSpec, read_model_spec

NUM_TOKENS = 64


def learner_logits(
    source: TensorSource, spec: ModelSpec, sequences: Sequence[torch.Tensor], dtype: str
) -> list[torch.Tensor]:
    """Return [S, V] of each sequence [1, S], without the ids that pad the vocabulary."""
    config = LearnerConfig.model_validate({"dtype": dtype})
    with cpu.install():
        world = init_world(config.parallel, seed=0, threads=None, timeout_s=600.0)
        (model,) = build_model(spec, world, config)
        load_weights(model, spec, world, source)
        found: list[torch.Tensor] = []
        for ids_1S in sequences:
            packing = Packing.of((ids_1S.shape[1],), world.device)
            with torch.no_grad():
                logits_1SV = model(ids_1S.to(world.device), None, None, packed_seq_params=packing)
            found.append(logits_1SV[0, :, : spec.vocab_size].cpu())
        return found


def transformers_logits(path: Path, ids_1S: torch.Tensor) -> torch.Tensor:
    """Return float32 [S, V] of one sequence.

    A quantised checkpoint is rounded to bfloat16, as a conversion of it is.
    """
    from transformers import AutoModelForCausalLM

    kind = converted_dtype(path, None) or torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True).float()
    with torch.no_grad():
        return model(ids_1S).logits[0]


def main() -> int:
    """Print {max_abs_logit_diff, max_abs_logit, tokens}."""
    parser = argparse.ArgumentParser(prog="python -m megatron_opd.learner.verify")
    parser.add_argument("megatron", type=Path)
    parser.add_argument("hf", type=Path)
    arguments = parser.parse_args()
    spec = read_model_spec(arguments.hf)
    generator = torch.Generator().manual_seed(0)
    ids_1S = torch.randint(spec.vocab_size, (1, NUM_TOKENS), generator=generator)
    source = MegatronSource(arguments.megatron, spec)
    (ours,) = learner_logits(source, spec, [ids_1S], "float32")
    theirs = transformers_logits(arguments.hf, ids_1S)
    result = {
        "max_abs_logit_diff": float((ours - theirs).abs().max()),
        "max_abs_logit": float(theirs.abs().max()),
        "tokens": NUM_TOKENS,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
