"""Makes a site's Hello, and decides at the learner's site whether it may take part in a run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_opd.config.digests import differing_keys
from megatron_opd.config.schema import Config
from megatron_opd.config.wording import shown
from megatron_opd.data.end_tokens import Ending
from megatron_opd.sites.identity import model_crc32, site_digests, tokenizer_crc32
from megatron_opd.sites.messages import PROTOCOL, SiteHello

MOST_KEYS = 5
"""Keys that a refusal names."""
MOST_CHARS = 120
"""Characters of a list of ids that a refusal shows."""


@dataclass(frozen=True, slots=True)
class ExpectedSite:
    """Says what a site must have like its learner's site; see messages.SiteHello."""

    digests: Mapping[str, str]
    model: int
    tokenizer: int
    vocab_size: int
    ends: Sequence[int]
    max_clock_skew_s: float

    @classmethod
    def of(cls, config: Config, vocab_size: int, ending: Ending) -> Self:
        """Return what a run expects. ValueError: the student's files cannot be read."""
        return cls(
            digests=site_digests(config),
            model=model_crc32(config.student.model),
            tokenizer=tokenizer_crc32(config.student.model),
            vocab_size=vocab_size,
            ends=ending.token_ids,
            max_clock_skew_s=config.sites.max_clock_skew_s,
        )


def hello_of(
    config: Config, site: str, vocab_size: int, ending: Ending, *, scores: bool
) -> SiteHello:
    """Return the Hello of site `site`, which holds nothing yet.

    config: the site's own. vocab_size, ending, scores: see SiteHello. ValueError: the student's
    files cannot be read.
    """
    model = config.student.model
    return SiteHello(
        protocol=PROTOCOL,
        site=site,
        process=uuid.uuid4().hex,
        slots=config.rollout.concurrency,
        scores=scores,
        digests=site_digests(config),
        model=model_crc32(model),
        tokenizer=tokenizer_crc32(model),
        vocab_size=vocab_size,
        ends=list(ending.token_ids),
        clock_s=time.time(),
        holds=[],
    )


def refusal(
    hello: SiteHello, name: str, scores: bool, expected: ExpectedSite, skew_s: float
) -> str | None:
    """Return in one line why a site is refused, or None.

    name: whose key it showed. scores: what sites.members says of it. skew_s: its clock less ours.
    """
    if hello.protocol != PROTOCOL:
        return (
            f"site {name} speaks protocol {hello.protocol}, the learner's site {PROTOCOL}: install "
            "the same release at both"
        )
    if hello.site != name:
        return (
            f"the key of site {name} was shown by a site that calls itself {hello.site[:64]!r}: "
            f"start it with run.dir/sites/{name}.keys, or by the name {name}"
        )
    keys = differing_keys(expected.digests, hello.digests)
    if keys:
        named = ", ".join(key[:80] for key in keys[:MOST_KEYS])
        more = f" and {len(keys) - MOST_KEYS} more" if len(keys) > MOST_KEYS else ""
        return f"site {name} has other values of {named}{more}: start it with the run's file"
    if hello.tokenizer != expected.tokenizer:
        return (
            f"site {name} has another tokenizer than the learner (student.model, CRC-32 "
            f"{hello.tokenizer:08x} instead of {expected.tokenizer:08x}): copy the learner's files"
        )
    if hello.model != expected.model:
        return (
            f"site {name} has another model than the learner (student.model, CRC-32 "
            f"{hello.model:08x} instead of {expected.model:08x}): copy the learner's files"
        )
    if hello.vocab_size != expected.vocab_size:
        return (
            f"site {name} samples from {hello.vocab_size} ids, the learner trains "
            f"{expected.vocab_size}: a teacher has fewer ids than the student; copy every "
            "teacher's config.json to where the run's file names it"
        )
    if hello.ends != list(expected.ends):
        theirs, ours = shown(hello.ends, MOST_CHARS), shown(list(expected.ends), MOST_CHARS)
        return (
            f"site {name} ends responses at ids {theirs}, the learner at {ours} (student.model: "
            "its generation_config.json and tokenizer_config.json): copy the learner's files"
        )
    if hello.scores != scores:
        return (
            f"site {name} must have sites.members.{name}.scores {str(scores).lower()} as the "
            f"learner has, got {str(hello.scores).lower()}: start it with the run's file"
        )
    if not abs(skew_s) <= expected.max_clock_skew_s:
        return (
            f"the clock of site {name} differs by {skew_s:+.1f} s from the learner's, more than "
            f"sites.max_clock_skew_s = {expected.max_clock_skew_s:g}: set both clocks"
        )
    if hello.slots < 1 or len(hello.holds) > hello.slots:
        return f"site {name} says that it holds {len(hello.holds)} prompts in {hello.slots} slots"
    return None
