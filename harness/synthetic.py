"""Random models, samples with random caches, and a data-parallel rank's share of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_opd.batching.shares import shares
from megatron_opd.checkpoint.convert import FreshSource
from megatron_opd.checkpoint.hf_files import SINGLE
from megatron_opd.checkpoint.hf_writer import write_safetensors
from megatron_opd.config.estimator import Estimator
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.models.spec import read_model_spec
from megatron_opd.models.tensors import expected_tensors
from megatron_opd.records.columns import RankBatch
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, Prompt, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache


def write_model(path: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """A checkpoint of the architecture in `config`, untrained, in bfloat16; returns `path`.

    Drawing a billion numbers takes longer than reading them, so that several cases share a model.
    """
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = read_model_spec(path)
    shapes, source = expected_tensors(spec), FreshSource(spec, seed=seed)

    def drawn(name: str) -> tuple[str, torch.Tensor]:
        shape = shapes[name]
        return name, source.read(name, shape, 0, 0, shape[0]).to(torch.bfloat16)

    layout = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    with ThreadPoolExecutor() as pool:
        write_safetensors(path / SINGLE, layout, pool.map(drawn, shapes))
    return path


@dataclass(frozen=True)
class Shape:
    """What a batch is made of: samples, each of `prompt` and `response` tokens.

    A response token has least_ids to most_ids cached ids.
    """

    samples: int
    prompt: int
    response: int
    least_ids: int
    most_ids: int


def sample(uid: int, shape: Shape, vocab: int, version: int = 0) -> Sample:
    """Uniform random tokens, with the log-probs of a model that knows nothing, more or less."""
    random = np.random.default_rng(uid)
    count_T = random.integers(shape.least_ids, shape.most_ids + 1, shape.response)
    # Distinct without drawing a permutation of the vocabulary for every token.
    apart_K = np.arange(shape.most_ids) * (vocab // shape.most_ids)
    ids_TK = (random.integers(0, vocab, (shape.response, 1)) + apart_K) % vocab
    ids_N = ids_TK[np.arange(shape.most_ids) < count_T[:, None]].astype(np.int32)
    offsets_T1 = np.concatenate([[0], np.cumsum(count_T)]).astype(np.int64)
    noise: Any = random.normal(0, 0.1, (2, len(ids_N)))
    logp_2N = (noise - np.log(vocab)).astype(np.float32)
    draws = DrawCache(
        offsets_T1=offsets_T1,
        ids_N=ids_N,
        weight_N=np.repeat(1 / count_T, count_T).astype(np.float32),
        sampler_logp_N=logp_2N[0],
        path_T=offsets_T1[:-1],
    )
    prompt = Prompt(uid, "", random.integers(0, vocab, shape.prompt).astype(np.int32))
    spans = (VersionSpan(version, 0, shape.response),)
    path_ids_T = ids_N[offsets_T1[:-1]]
    return Sample(single_turn(prompt, path_ids_T, draws, spans, "length", 0.0, 0.0), logp_2N[1])


def share(
    samples: Sequence[Sample], config: LearnerConfig, data_rank: int, update: int
) -> RankBatch:
    """What one data-parallel rank gets of an update's batch, planned as the controller plans."""
    batch = Batch(update, update, tuple(samples))
    return shares(batch, config, Estimator(), group_size=1)[data_rank].columns()
