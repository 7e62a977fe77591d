"""Asks student and teacher about a few responses of a batch, beside the run (metrics.health_every).

Nothing waits for the answers: they become columns of the next row that is written after them. The
student's servers answer with the weights that they have then. A request that fails is not repeated,
and costs the figures of one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.config.metrics import MetricsConfig
from megatron_opd.metrics.opd_health import PREFIX, ScoredSelection, measure
from megatron_opd.records.seeds import HEALTH, derived_seed
from megatron_opd.records.types import AnySample, Batch, IntArray, Rollout, Sample, sample_here
from megatron_opd.rollout.scorer import ScoreFleet
from sglang_bridge.errors import BadReply, BridgeError
from sglang_bridge.protocol import OffsetArray, ScoreRequest, Selection

logger = logging.getLogger(__name__)

DRAWS = 16
"""Draws from what the likeliest ids leave, for both entropies: without them they would be those of
the likeliest ids alone."""


Whole = Callable[[AnySample], Awaitable[Sample]]


async def here(sample: AnySample) -> Sample:
    """Return a sample whose arrays are in this process."""
    return sample_here(sample)


class HealthProbe:
    """Measures every so many updates how student and teacher agree on some of a batch.

    Args:
        student: the student's servers.
        teachers: the servers of every teacher, by the name that prompts know it by.
        settings: how often, on how many responses, on how many likeliest ids.
        temperatures: of the student's distribution and the teachers'.
        end_ids: ids that end a response.
        vocab_size: ids of the student, of which no more can be asked for.
        name: makes request names unique.
        seed: the run's, of what deterministic servers draw.
        whole: returns a sample with its arrays. SamplesLost: they are gone.
    """

    def __init__(
        self,
        student: ScoreFleet,
        teachers: Mapping[str, ScoreFleet],
        settings: MetricsConfig,
        temperatures: tuple[float, float],
        end_ids: frozenset[int],
        vocab_size: int,
        name: str,
        seed: int = 0,
        whole: Whole = here,
    ) -> None:
        self._whole = whole
        self._student, self._teachers = student, dict(teachers)
        self._every, self._samples = settings.health_every, settings.health_samples
        self._top_k = min(settings.health_top_k, vocab_size)
        self._temperatures, self._end_ids = temperatures, end_ids
        self._name, self._seed = name, seed
        self._task: asyncio.Task[dict[str, float | int | None]] | None = None
        self._warned = False

    def start(self, batch: Batch) -> None:
        """Begin to measure a batch if it is its turn and the one before is done."""
        if self._task is None and batch.update % self._every == 0:
            self._task = asyncio.get_running_loop().create_task(
                self._columns(batch), name="teacher health"
            )

    def columns(self) -> Mapping[str, float | int | None]:
        """Return the figures that have come since the last call; nothing while there are none."""
        if self._task is None or not self._task.done():
            return {}
        task, self._task = self._task, None
        return task.result()

    def stop(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _columns(self, batch: Batch) -> dict[str, float | int | None]:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            chosen = [await self._whole(sample) for sample in batch.samples[: self._samples]]
            responses = await asyncio.gather(*(self.score(sample.rollout) for sample in chosen))
        except (BridgeError, SamplesLost) as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "update %d: its health was not measured (%s); more of this kind are not told",
                    *(batch.update, error),
                )
            return {}
        figures = measure(responses, self._top_k, self._end_ids)
        about = {f"{PREFIX}update": batch.update, f"{PREFIX}s": clock() - began_s}
        return figures.columns() | about

    async def score(self, rollout: Rollout) -> ScoredSelection:
        """Return what the student, and then its teacher, say of one response. BridgeError."""
        tokens = rollout.num_response_tokens
        given = np.array(sorted(self._end_ids), dtype=np.int32)
        student = await self._select(
            *(self._student, "student", rollout, self._temperatures[0]),
            np.arange(tokens + 1, dtype=np.int64) * len(given),
            np.tile(given, tokens),
        )
        fleet = self._teachers[rollout.prompt.teacher]
        teacher = await self._select(
            *(fleet, "teacher", rollout, self._temperatures[1]), student.offsets_T1, student.ids_N
        )
        return ScoredSelection(student, teacher)

    async def _select(
        self,
        fleet: ScoreFleet,
        role: str,
        rollout: Rollout,
        temperature: float,
        offsets_T1: OffsetArray,
        ids_N: IntArray,
    ) -> Selection:
        prompt = rollout.prompt
        request = ScoreRequest(
            rid=f"{self._name}-health-{role}-{prompt.uid}",
            input_ids=np.concatenate([prompt.token_ids_P, rollout.response_ids_T]),
            num_prompt_tokens=len(prompt.token_ids_P),
            offsets_T1=offsets_T1,
            ids_N=ids_N,
            temperature=temperature,
            num_atoms=self._top_k,
            num_draws=DRAWS,
            seed=derived_seed(self._seed, HEALTH, prompt.uid),
        )
        reply = await fleet.score(request)
        if reply.selection is None:
            raise BadReply(f"request {request.rid} came back without a selection")
        return reply.selection
