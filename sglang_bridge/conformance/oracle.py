"""Computes a checkpoint's log-probs with transformers in float64, where that is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sglang_bridge.conformance.asking import Asked, DoubleArray
from sglang_bridge.conformance.scores import Measured

LENGTHS = (2, 24, 61)


class Oracle:
    """Holds the model of a checkpoint's directory. ImportError: there is no transformers."""

    def __init__(self, directory: Path) -> None:
        import transformers

        self._new_batch = transformers.BatchEncoding
        loaded: Any = transformers.AutoModelForCausalLM
        model = loaded.from_pretrained(directory, dtype="float64", local_files_only=True)
        self._model = model.eval().requires_grad_(False)

    def rows(self, ids: list[int]) -> DoubleArray:
        """Returns [len(ids) - 1, V] log-probs of what follows each id but the last."""
        batch = self._new_batch({"input_ids": [ids[:-1]]}, tensor_type="pt")
        logits_TV = self._model(**batch).logits[0].double().numpy()
        shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
        return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))

    async def equals_the_model(self, asked: Asked) -> Measured:
        """Checks that log-probs are those of transformers in float64."""
        far: list[float] = []
        for length in LENGTHS:
            ids = asked.sequence(30 + length, length)
            rows_TV = self.rows(ids)[:, : asked.vocab_size]
            path_T = rows_TV[np.arange(length - 1), ids[1:]]
            far.append(float(np.abs(await asked.path(ids) - path_T).max()))
            far.append(float(np.abs(await asked.whole(ids) - rows_TV[-1]).max()))
        worst = max(far)
        return (worst if math.isfinite(worst) else math.inf), asked.limit_nats
