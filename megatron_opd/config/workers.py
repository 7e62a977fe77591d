"""Defines the section of the data workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megatron_opd.config.section import Section


class WorkersConfig(Section):
    """Says how many processes move the samples; docs/data_workers.md says when they are needed."""

    count: Annotated[int, Field(ge=0, le=1024)] = 0
    """Data workers. Each makes all requests to its part of the servers, checks the answers, judges
    them with verifier.workers processes of its own, and hands samples to the learner's ranks; the
    controller keeps their order alone. 0: the controller does all this itself, which is enough for
    some 250 samples of 4,096 tokens a second. Updates are the same with any number. Each takes a
    core while it is busy, and the memory of its share of the samples in flight."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often data workers that ended are started again, all together. What one held is sampled
    anew. After that a run goes on with those that are left, and ends with the last."""
