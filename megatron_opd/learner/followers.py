"""Keeps the weights of teachers that follow the student, in each learner rank for its own shards.

    student: the live weights                     lagged: a copy of them, made every n updates
    ema:     a <- d a + (1 - d) w, each update    ema with every n: a copy of a as well

w are the weights that the student's servers get, in learner.dtype, and not the optimizer's float32
main parameters: those are split among data-parallel ranks, w is the same on all that hold a copy of
a shard. So is a, without a message between ranks, and at every layout: products and sums are of
single numbers, each rounded once to float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_opd.config.roles import Role
from megatron_opd.config.sources import AverageSource, TeacherSource
from megatron_opd.models.gather import FullTensors


class FollowerWeights:
    """Holds what one teacher's servers are sent. live: the learner's weights, of version 0 now.

    average: float32; None: the source has none. published: the version that the servers are to
    have, which may be `average` or the live weights themselves.
    """

    def __init__(self, live: FullTensors, source: TeacherSource) -> None:
        self._live, self._source = live, source
        self.average = live.copied(torch.float32) if source.keeps_average else None
        self.published = self._newest.copied() if source.keeps_copy else self._newest

    @property
    def _newest(self) -> FullTensors:
        return self._live if self.average is None else self.average

    @property
    def kept(self) -> Mapping[str, FullTensors]:
        """Returns what is in no other part of the learner's state, by name."""
        found = {} if self.average is None else {"average": self.average}
        return found | ({"published": self.published} if self._source.keeps_copy else {})

    def after_update(self, updates: int) -> None:
        """Take over what the source takes of the live weights, after so many updates.

        They must be whole on every rank.
        """
        if self.average is not None:
            assert isinstance(self._source, AverageSource), "no other source has an average"
            add(self.average, self._live, self._source.decay)
        if self._source.keeps_copy and self._source.version_at(updates) == updates:
            self.published.become(self._newest)


@torch.no_grad()
def add(average: FullTensors, live: FullTensors, decay: float) -> None:
    """Average the live weights in: a <- decay a + (1 - decay) w, elementwise in float32.

    The product and the sum are rounded apart: fused, a GPU's bits would differ from a CPU's.
    """
    for key, shard in average.shards.items():
        mean = shard.parameter
        mean.mul_(decay)
        mean.add_(live.shards[key].parameter.float() * (1 - decay))


def kept_tensors(followers: Mapping[Role, FollowerWeights]) -> dict[str, FullTensors]:
    """Return {role.what: tensors} of all that the followers keep, for the learner's checkpoint."""
    return {
        f"{role}.{what}": tensors
        for role, follower in followers.items()
        for what, tensors in follower.kept.items()
    }
