"""Says what a site is, when it introduces itself."""

from __future__ import annotations

import time
import uuid

from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import Ending
from megatron_opd.sites.identity import model_crc32, site_digests, tokenizer_crc32
from megatron_opd.sites.messages import PROTOCOL, SiteHello


def hello_of(
    config: Config, site: str, vocab_size: int, ending: Ending, *, scores: bool
) -> SiteHello:
    """Return what site `site` says of itself, holding nothing yet.

    config: the site's own. vocab_size, ending: see Hello. ValueError: the student's files cannot be
    read.
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
