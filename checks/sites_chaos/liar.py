"""`opd site` that lies about its samples: `python -m checks.sites_chaos.liar KIND site ...`.

Servers, link, weights and samples are those of a sound site; what it says of them is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from megatron_opd.cli.main import console
from megatron_opd.records.types import Sample, VersionSpan
from megatron_opd.sites import site_weights
from megatron_opd.sites.messages import Serving
from megatron_opd.sites.outbox import Finished
from megatron_opd.sites.sampling import SiteSampling

MODULE = "checks.sites_chaos.liar"
AHEAD = 1000
"""Versions that no run of the check reaches."""
SHIFT_NATS = 1.0
HONEST, SERVING = "honest", "serving"


def with_logp(sample: Sample, forged: Callable[[np.ndarray], np.ndarray]) -> Sample:
    """Return the sample with other log-probs of the sampler."""
    draws = sample.rollout.draws
    logp_N = forged(draws.sampler_logp_N).astype(draws.sampler_logp_N.dtype)
    return replace(
        sample, rollout=replace(sample.rollout, draws=replace(draws, sampler_logp_N=logp_N))
    )


def from_the_future(sample: Sample) -> Sample:
    """Return the sample as if it were of versions that nobody has."""
    spans = tuple(
        VersionSpan(span.version + AHEAD, span.start, span.stop) for span in sample.rollout.spans
    )
    return replace(sample, rollout=replace(sample.rollout, spans=spans))


LIES: dict[str, Callable[[Sample], Sample]] = {
    "versions": from_the_future,
    "above": lambda sample: with_logp(sample, lambda logp_N: logp_N + SHIFT_NATS),
    "zeros": lambda sample: with_logp(sample, np.zeros_like),
    "below": lambda sample: with_logp(sample, lambda logp_N: logp_N - SHIFT_NATS),
}
KINDS = (*LIES, SERVING)


@contextmanager
def lying(kind: str) -> Iterator[None]:
    """Let every site of this process lie; HONEST: change nothing."""
    encoded, serving = SiteSampling._encoded, site_weights.Serving
    lie = LIES.get(kind)
    if lie is not None:

        def forged(sampling: SiteSampling, sample: Sample) -> Finished:
            return encoded(sampling, lie(sample))

        SiteSampling._encoded = forged
    elif kind == SERVING:
        site_weights.Serving = lambda version: Serving(version + AHEAD)
    elif kind != HONEST:
        raise ValueError(f"unknown lie {kind!r}; choices: {', '.join((HONEST, *KINDS))}")
    try:
        yield
    finally:
        SiteSampling._encoded, site_weights.Serving = encoded, serving


def main(words: Sequence[str]) -> int:
    """Run `opd` with one kind of lie; returns its exit code."""
    kind, *rest = words
    with lying(kind):
        return console(rest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
