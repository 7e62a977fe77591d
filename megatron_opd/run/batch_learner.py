"""Cuts a batch into shares and sends them to the learner's ranks, again until they can take it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from megatron_opd.batching.shares import shares
from megatron_opd.buffer.rejection import SamplesLost
from megatron_opd.config.schema import Config
from megatron_opd.data_workers.pool import WorkerPool, WorkersUnreachable
from megatron_opd.metrics.mismatch_gap import Bound, ModelsDiffer
from megatron_opd.records.types import AnySample, Batch, HeldSample
from megatron_opd.run.first_update import MismatchJudge
from megatron_opd.transport.messages import UpdateMetrics
from megatron_opd.transport.remote_learner import RemoteLearner
from megatron_opd.transport.samples import EncodedSample, counted_draws

ASK_AGAIN_S = 2.0
"""Ranks that could not take samples are asked again so long after; a worker that is lost is known
to be so after a few of these (heartbeats)."""

UNREACHABLE_S = 60.0
"""A run ends if its ranks cannot take samples for so long from workers that are there."""


@dataclass(frozen=True, slots=True)
class BatchLearner:
    """Acts as the controller's learner: cuts a batch into shares and sends them.

    pool: tells where ranks take the samples that data workers hold. judge: of the mismatch of the
    first update; None: nobody judges it.
    """

    config: Config
    remote: RemoteLearner
    pool: WorkerPool | None = None
    judge: MismatchJudge | None = None

    def prepare(self, sample: AnySample) -> AnySample:
        """Encode a scored sample, unless a data worker does. ValueError: it is malformed."""
        if isinstance(sample, HeldSample):
            return sample
        return EncodedSample.of(sample, counted_draws(self.config.estimator.support))

    async def train(self, batch: Batch) -> UpdateMetrics:
        """Make one update. SamplesLost. ValueError: the batch cannot be split into shares.

        UserError: learner and servers are not the same model.
        """
        judge = self.judge
        if judge is None:
            return await self._update(batch, None)
        try:
            metrics = await self._update(batch, judge.bound)
        except ModelsDiffer as error:
            raise judge.refusal(batch.update, error.gap) from None
        judge.see(batch.update, metrics)
        return metrics

    async def _update(self, batch: Batch, bound: Bound | None) -> UpdateMetrics:
        """Make one update, or raise ModelsDiffer.

        Ranks that cannot take samples of workers that are there are asked again, for
        UNREACHABLE_S; then WorkersUnreachable.
        """
        config, pool = self.config, self.pool
        batch = replace(batch, samples=tuple(map(self.prepare, batch.samples)))
        parts = shares(batch, config.learner, config.estimator, config.rollout.group_size)
        held = [sample for sample in batch.samples if isinstance(sample, HeldSample)]
        if pool is None or not held:
            return await self.remote.train(parts, bound=bound)
        clock, first_s = asyncio.get_running_loop().time, None
        while True:
            sources = {sample.rollout.prompt.uid: pool.source(sample) for sample in held}
            metrics = await self.remote.train_held(parts, sources, bound)
            if metrics is not None:
                return metrics
            first_s = clock() if first_s is None else first_s
            if await pool.loses_one_of(held, ASK_AGAIN_S):
                raise SamplesLost(f"update {batch.update}: a data worker was lost")
            if clock() - first_s >= UNREACHABLE_S:
                workers = sorted({sample.rollout.worker for sample in held})
                raise WorkersUnreachable(
                    f"the learner's ranks could not take all samples of {', '.join(workers)} for "
                    f"{UNREACHABLE_S:g} s; the learner's log says from whom, and why"
                )
