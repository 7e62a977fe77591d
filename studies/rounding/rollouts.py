"""Responses of the pretrained student with their draw caches and scores, by transformers alone.

Axes: B prompts, P prompt tokens, T response tokens, V ids, N cached (token, id) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from examples.smollm2.evaluate import complete, load, logp_TV, rendered
from megatron_opd.data.records import read_records
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Prompt, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache

PROMPTS = Path("examples/smollm2/train.jsonl")
DRAWS = 64


@torch.no_grad()
def rollouts(student: Path, teacher: Path, batch: int, tokens: int) -> Iterator[list[Sample]]:
    """Yield batches of `batch` responses of at most `tokens` tokens, each on new prompts."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    asked = [row["prompt"] for row in read_records(PROMPTS, ["prompt"])]
    prompts = rendered(asked, tokenizer)
    models = load(student), load(teacher)
    for first in range(0, len(prompts) - batch + 1, batch):
        chosen = prompts[first : first + batch]
        made = complete(models[0], chosen, tokens, greedy=False)
        pairs = zip(chosen, made, strict=True)
        yield [sample(first + i, models, *pair) for i, pair in enumerate(pairs)]


def sample(
    uid: int,
    models: tuple[PreTrainedModel, PreTrainedModel],
    prompt_P: list[int],
    response_T: list[int],
) -> Sample:
    """Draw a cache of DRAWS ids at every token, equal ones joined; the path token is one of them.

    Unbiased, as the servers' caches are: see docs/estimators.md.
    """
    student_TV = logp_TV(models[0], prompt_P, response_T)
    teacher_TV = logp_TV(models[1], prompt_P, response_T)
    drawn_TK = torch.multinomial(student_TV.exp(), DRAWS - 1, replacement=True)
    path_T1 = torch.tensor(response_T)[:, None]
    ids, counts, places = [], [], []
    for row_K in torch.cat([path_T1, drawn_TK], 1):
        unique, count = row_K.unique(return_counts=True)
        places.append(int((unique == row_K[0]).nonzero()[0, 0]))
        ids.append(unique)
        counts.append(count)
    offsets_T1 = np.cumsum([0, *map(len, ids)])
    row_N = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor([len(i) for i in ids]))
    id_N = torch.cat(ids)
    draws = DrawCache(
        offsets_T1=offsets_T1.astype(np.int64),
        ids_N=id_N.numpy().astype(np.int32),
        weight_N=(torch.cat(counts) / DRAWS).numpy().astype(np.float32),
        sampler_logp_N=student_TV[row_N, id_N].numpy(),
        path_T=(offsets_T1[:-1] + np.array(places)).astype(np.int64),
    )
    prompt = Prompt(uid, "", np.array(prompt_P, np.int32))
    spans = (VersionSpan(0, 0, len(response_T)),)
    rollout = single_turn(prompt, np.array(response_T, np.int32), draws, spans, "length", 0.0, 0.0)
    return Sample(rollout, teacher_TV[row_N, id_N].numpy())
