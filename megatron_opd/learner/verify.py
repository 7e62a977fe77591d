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
from typing import Any

import torch

from megatron_opd.checkpoint.convert import load_weights
from megatron_opd.checkpoint.hf_formats import model_tensors
from megatron_opd.checkpoint.hf_reader import converted_dtype, read_rows
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

    if (kind := converted_dtype(path, None)) is not None:
        model = of_quantised(path, kind)[0].float()
    else:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        )
    with torch.no_grad():
        return model(ids_1S).logits[0]


def of_quantised(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model of a quantised checkpoint in `dtype`, and what it lacked.

    transformers' own loading of these formats needs packages that nothing else here does. Raises
    ValueError as hf_formats.model_tensors does.
    """
    import transformers

    stored = model_tensors(path)
    state = {name: read_rows(each, 0, each.shape[0]) for name, each in stored.items()}
    config: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    del config.quantization_config
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )


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
