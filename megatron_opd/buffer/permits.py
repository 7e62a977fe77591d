"""Bounds staleness: a prompt holds one of P permits until dropped, or trained and live.

  1. A prompt is admitted only while it takes a permit; there are P of them.
  2. Batch k takes the samples k B .. (k + 1) B - 1 in admission order, among those never dropped.
  3. A dropped sample returns its permit at once.
  4. The permits of batch k are returned only when a version >= k + 1 is live on every engine.

Then every token that update k trains on was sampled by a version >= k - (ceil(P / B) - 1), where B
is the batch size and a version is the number of updates that its weights have seen. With P =
(tau + 1) B that is tau updates. docs/staleness.md has the proof, and the rules for groups, sites,
completion order, lost servers, and an exact or drawn staleness.

Source: AsyncOPD (arXiv 2606.24143) App. G, queue-depth parameter tau; verl's fully asynchronous
trainer, whose `rollout_num` is P.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from megatron_opd.buffer.rejection import TooOld
from megatron_opd.records.drops import TOO_STALE
from megatron_opd.records.types import AnySample, Batch


class TooStale(TooOld):
    """Reports a site's sample that is older than any update may train on."""

    remedy = (
        "raise sites.max_staleness (with permits schedule.max_staleness), let weights reach the "
        "sites faster, or lower sites.members.NAME.concurrency"
    )

    def __init__(self, version: int, updates: int, bound: int) -> None:
        age = updates - version
        super().__init__(TOO_STALE, f"{age} updates old at update {updates}, the bound is {bound}")


class PermitError(RuntimeError):
    """Reports a permit taken twice, or returned by a prompt that holds none: a scheduler bug."""


class StalenessExceeded(RuntimeError):
    """Reports a sample older than the rule allows, or newer than the learner: a scheduler bug."""


class Permits:
    """Holds P permits, each under the uid of its prompt.

    Args:
        total: P.
        holders: prompts that hold one from the start.
    """

    def __init__(self, total: int, holders: Collection[int] = ()) -> None:
        self.total = total
        if len(holders) > self.total:
            raise PermitError(f"{len(holders)} prompts hold permits, there are {self.total}")
        self._free = asyncio.Semaphore(self.total - len(holders))
        self._holders: set[int] = set(holders)

    @property
    def in_use(self) -> int:
        """Returns the number of permits held now."""
        return len(self._holders)

    async def free(self) -> None:
        """Wait until `acquire` would not wait, if nobody else takes a permit before."""
        async with self._free:
            pass

    async def acquire(self, uid: int) -> None:
        """Wait for a permit and hold it for prompt `uid`. A cancelled wait takes nothing."""
        if uid in self._holders:
            raise PermitError(f"prompt {uid} already holds a permit")
        await self._free.acquire()
        self._holders.add(uid)

    def release(self, uids: Iterable[int]) -> None:
        """Return the permits of `uids`. Raises PermitError for one that holds none."""
        for uid in uids:
            if uid not in self._holders:
                raise PermitError(f"prompt {uid} returns a permit it does not hold")
            self._holders.remove(uid)
            self._free.release()


def staleness_versions(sample: AnySample, learner_version: int) -> int:
    """Return the learner's version minus the version of the sample's oldest token."""
    return learner_version - sample.rollout.oldest_version


def check_staleness(batch: Batch, bound: int) -> None:
    """Reject a batch that breaks the bound, as the controller asks before every update.

    Raises StalenessExceeded naming the sample.
    """
    for sample in batch.samples:
        newest = max(span.version for span in sample.rollout.spans)
        staleness = staleness_versions(sample, batch.version)
        uid = sample.rollout.prompt.uid
        if newest > batch.version:
            raise StalenessExceeded(
                f"sample {uid} of update {batch.update} has tokens of version {newest}, "
                f"newer than the learner's {batch.version}"
            )
        if staleness > bound:
            raise StalenessExceeded(
                f"sample {uid} of update {batch.update} is {staleness} versions old, "
                f"the bound is {bound}"
            )
