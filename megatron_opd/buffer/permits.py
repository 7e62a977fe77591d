"""Bounds staleness: a prompt holds one of P permits until dropped, or trained and live.

Words: B is the batch size, n the number of updates from one weight sync to the next, s how far
sampling may run ahead in windows of n B samples: P = n B + floor(s n B). A *version* is named after
the number of updates that its weights have seen. Update k (0-based) trains batch k on weights of k
updates; a weight sync follows when n divides k + 1, and after the last update. The staleness of a
token is k minus its version: the updates between the weights that sampled it and those that learn
from it. With n = 1 and a whole s = tau, P is (tau + 1) B.

Rules:
  R1. A prompt is admitted only while it takes a permit; there are P of them.
  R2. Batches take samples in admission order: batch k holds the samples k B .. (k + 1) B - 1 among
  those never dropped. (With order completion: see below.)
  R3. A dropped sample returns its permit at once.
  R4. The permits of batch k are returned only when a version >= k + 1 is live on every engine.
  R5. Where the loss compares the G samples of a group (G divides B), a drop breaks its group: no
  member is admitted any more, the scored ones are dropped, one in flight is when it arrives.
  R6. Batch k is trained once h more batches are scored behind it, 0 <= h <= floor(s n), or no more
  come.

Claim: every token of every sample of batch k was sampled by a version >= k - b, where
b = ceil(P / B) - 1, which is tau for n = 1 and n - 1 for s = 0.

Proof. Let sample s be admitted while version v is live. No token of s is older than v: its first
token is sampled after its admission, and engines only move to newer versions. By R4 exactly the
permits of batches 0 .. v - 1 have been returned for training, v B in all. Of the prompts admitted
up to and including s, those neither dropped nor among these v B hold a permit each, so by R1 they
are at most P. Hence at most v B + P prompts up to and including s are not dropped, now or later,
and by R2 s is in a batch k <= (v B + P - 1) / B, so k - v <= floor((P - 1) / B) = b. QED.

Nothing in it says when update k begins: it holds as well where update k runs before the version
that it follows is live (weight_sync.overlap), as permits are returned in order and only with a live
version (R4). Nothing in it says what becomes of a response in flight at a weight sync either: a
rollout that is aborted and sampled anew keeps its permit, and its tokens are newer.

Completion order. Batches take what was finished first, as far as no sample misses its deadline:
one admitted under version v is in a batch k <= v + A, for a chosen A >= b (with groups: whole
groups, a group's deadline is its first member's, and all its members count from then on). Batch k
may be cut so that for every deadline D the samples due by D that are left fit into the batches
k + 1 .. D. Claim: such a batch exists as soon as everything in flight is scored, so no sample
misses its deadline and the learner never stalls. Proof: let c(D) be the samples due by D before
batch k; the invariant is c(D) <= (D - k + 1) B for all D. Taking samples by their deadline keeps it
for every D. A prompt admitted later, under a version w <= k, is due by w + A and adds to c(D) for D
>= w + A alone. Not dropped and not trained on are then at most P - (k - w) B, because by R4 the
permits of batches w .. k - 1 are not returned yet (of the one group that is admitted in part, the
members to come add less than G, and B is a multiple of G); and P <= (A + 1) B, so that c(w + A) <=
(A + 1) B - (k - w) B: the invariant holds again. QED. So staleness <= A.

Recoveries. A request that is repeated because its server was lost keeps its prompt's permit and
place in line, and all its tokens are sampled after the admission: the proofs stand. A server that
was started again serves only once it holds the live version, so that each engine that serves has
only moved to newer versions. When the learner is lost, the controller's whole state goes back to
that of a checkpoint of u updates: no token of a later version is kept, every engine holds version u
before any of them samples, and from there on the run is one that began with that state. So the
claims hold in the history that survives (`python -m benchmarks fault_schedules`).

Groups. A member of a broken group holds its permit until it is dropped, so the proof stands: R5
only says which samples are dropped. Claim: every batch holds whole groups. Members are admitted in
a row, so those never dropped form, in admission order, blocks of G (R5 drops whole groups), and a
batch takes B of them from the front, a multiple of G. No member is missed: a batch is taken from
scored samples only, and a group with all members scored loses none later.

Sites (megatron_opd/sites/). A sampler site has weights of its own, maybe older than the live ones,
so the step "no token of s is older than v" is gone. In its place a sample that is older than the
bound, b or A, is dropped (too_stale) when it arrives, or when an update makes it so, before a batch
is cut: the claims hold for what is trained on, and to the proofs it is a sample that was dropped.

Open admission (sites.admission open; HeteroRL). R1 is replaced: a prompt is admitted while fewer
than S are neither scored nor dropped, S being the slots of all sites. R2 too: a batch takes the
groups that were complete first. What is older than the window W is dropped as above, so staleness
<= W, whatever the sites do. Claim: P = (S + 1) G + (W + 1 + n) B permits stop no site before what
it would sample had to wait too long. Proof: groups with a member in flight are at most S, and one
is admitted in part, which is (S + 1) G prompts; n B belong to batches since the last weight sync.
If no permit is left before update k, (W + 1) B samples of complete groups wait, so the next batch
is there; and unless some of these are dropped, what is sampled behind them, with version k at most,
is in batch k + W + 1 at the earliest, older than W. QED.

Groups dropped for their rewards (buffer/spread.py). A group all of whose members are scored may be
dropped whole, before its last member enters the buffer: no batch holds one of them, each returns
its permit at once (R3), and to every claim it is a group that was dropped. It waits at most for
groups admitted before it, whose members all hold permits already and are scored or dropped without
it, so nothing in flight waits for it in turn. At most N groups in a row are dropped, so that of
every N + 1 judged in a row one is kept: a batch of B takes at most (N + 1) B prompts, besides those
that are dropped for other reasons.

No stall. Claim: the learner gets its next batch. When it waits before update k, the permits of all
batches before the last weight sync are back (R4), or are once the sync beside it is done, which
waits for no sample that is not in flight; and a sample in flight is scored or dropped in the end.
If none is in flight and admission is blocked for want of a permit, all permits but those of the at
most n - 1 batches since that weight sync, P - (n - 1) B >= (h + 1) B of them, are held by scored
samples at the front of the line: the batch is there. If admission has ended, what is left drains.

Exact staleness. With n = 1 and h = tau every token of batch k is min(k, tau) versions old: training
on batch k takes all (tau + 1) B permits' samples to be scored, so nothing is in flight while a
version goes live, and the B prompts admitted under version v > 0 (with what replaces dropped ones)
are batch v + tau. This is the controlled staleness axis of AsyncOPD App. B.

Drawn staleness (buffer/planned.py). With n = 1 and P = (tau + 1) B, update k's batch is to be
sampled by version s(k), max(0, k - tau) <= s(k) <= k, for any choice of s. In place of R1 alone, a
prompt is admitted under version v only while fewer than B #{j: s(j) <= v} are, not counting those
dropped; in place of R2, prompts in admission order fill the batches in the order of (s(j), j); and
update k begins once all that were admitted by then, B #{j: s(j) <= k}, are scored. Claim: every
token of batch k is of version s(k). Proof: nothing is in flight while a version goes live, so what
is admitted under v, replacements of dropped prompts included, has tokens of v alone, and fills
exactly the batches j with s(j) = v. No permit is waited for: held under version v are those of
batches j >= v with s(j) <= v, so that j <= v + tau, at most tau + 1 batches. Each sample is trained
on once, as each batch is. Each version samples as many batches as are planned for it, 0 or
several: with one for each version, tau + 1 batches would be held at all times, and their mean
staleness would be tau, whatever is drawn (Little's law).

The bound is tight: when all P prompts are admitted and finished at version 0, the last of them are
in batch b.

Why not completion order without deadlines (batches of whatever finished first)? R2 is what ties an
admission time to a batch index. A long rollout admitted at version 0 holds one permit, the other
P - 1 keep flowing past it, and it can be trained on after any number of versions: no bound holds,
and long responses are systematically the stalest. Why not return permits at consumption (before the
new version is live)? Then up to n B prompts more are admitted under the old version, and the
staleness reaches b + n.

Source: AsyncOPD (arXiv 2606.24143) App. G, queue-depth parameter tau; verl's fully asynchronous
trainer, whose `rollout_num` is P (trigger_parameter_sync_step n, staleness_threshold s). The proofs
and the tightness are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from megatron_opd.buffer.rejection import TooOld
from megatron_opd.records.types import AnySample, Batch

TOO_STALE = "too_stale"


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
    """Reject a batch that breaks the bound. Raises StalenessExceeded naming the sample."""
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
