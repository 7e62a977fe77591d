"""Asks student and teacher about a few responses of a batch, beside the run (metrics.health_every).

The student's servers answer with the weights that they have then. What a mixture of teachers scores
is left out: none of them knows its likeliest ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Literal

import numpy as np

from megatron_opd.config.roles import STUDENT, Role, answering
from megatron_opd.config.schema import Config
from megatron_opd.metrics.opd_health import PREFIX, ScoredSelection, measure
from megatron_opd.records.seeds import HEALTH, derived_seed
from megatron_opd.records.sequences import rollouts_by_sequence
from megatron_opd.records.types import Batch, IntArray, Rollout
from megatron_opd.rollout.beside import BesideProbe, Columns, Whole, here
from megatron_opd.rollout.scorer import ScoreFleet
from sglang_bridge.errors import BadReply
from sglang_bridge.protocol import OffsetArray, ScoreRequest, Selection

DRAWS = 16
"""Draws from what the likeliest ids leave, for both entropies: without them they would be those of
the likeliest ids alone."""


class HealthProbe(BesideProbe):
    """Measures every so many updates how student and teacher agree on some of a batch.

    Args:
        config: how often, on how many responses, on how many likeliest ids (metrics.health_*).
        fleets: the servers of the student and of every teacher.
        vocab_size: ids of the student, of which no more can be asked for.
        end_ids: ids that end a response.
        whole: returns a sample with its arrays. SamplesLost: they are gone.
    """

    def __init__(
        self,
        config: Config,
        fleets: Mapping[Role, ScoreFleet],
        vocab_size: int,
        end_ids: frozenset[int],
        whole: Whole = here,
    ) -> None:
        super().__init__("its health", PREFIX, config.metrics.health_every)
        self._config, self._end_ids, self._whole = config, end_ids, whole
        self._student = fleets[STUDENT]
        self._teachers = {name: fleets[role] for name, role in answering(config).items()}
        self._top_k = min(config.metrics.health_top_k, vocab_size)

    async def measured(self, batch: Batch) -> Columns:
        """Return the figures of the first responses of a batch. Raises BridgeError, SamplesLost."""
        alone = (sample for sample in batch.samples if not sample.rollout.prompt.mixture)
        first = tuple(islice(alone, self._config.metrics.health_samples))
        if not first:
            return {}
        chosen = [await self._whole(sample) for sample in first]
        rollouts = [r for sample in chosen for r in rollouts_by_sequence(sample.rollout)]
        responses = await asyncio.gather(*map(self.score, rollouts))
        return measure(responses, self._top_k, self._end_ids).columns()

    async def score(self, rollout: Rollout) -> ScoredSelection:
        """Return what the student, and then its teacher, say of one sequence. BridgeError."""
        tokens = rollout.num_response_tokens
        given = np.array(sorted(self._end_ids), dtype=np.int32)
        offsets_T1 = np.arange(tokens + 1, dtype=np.int64) * len(given)
        student = await self._select("student", rollout, offsets_T1, np.tile(given, tokens))
        teacher = await self._select("teacher", rollout, student.offsets_T1, student.ids_N)
        return ScoredSelection(student, teacher)

    async def _select(
        self,
        whom: Literal["student", "teacher"],
        rollout: Rollout,
        offsets_T1: OffsetArray,
        ids_N: IntArray,
    ) -> Selection:
        prompt, config = rollout.prompt, self._config
        fleet, temperature = self._student, config.rollout.temperature
        if whom == "teacher":
            fleet, temperature = self._teachers[prompt.teacher], config.scoring.temperature
        request = ScoreRequest(
            rid=f"{self._run_id}-health-{whom}-{prompt.uid}",
            input_ids=rollout.sequences[0],
            runs=tuple((run.start, run.stop) for run in rollout.runs),
            offsets_T1=offsets_T1,
            ids_N=ids_N,
            temperature=temperature,
            num_atoms=self._top_k,
            num_draws=DRAWS,
            seed=derived_seed(config.run.seed, HEALTH, prompt.uid),
        )
        reply = await fleet.score(request)
        if reply.selection is None:
            raise BadReply(f"request {request.rid} came back without a selection")
        return reply.selection
