"""Defines the section of sampler sites, which are far from the learner (HeteroRL)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_opd.config.delays import DelayConfig
from megatron_opd.config.section import (
    ByteCount,
    Concurrency,
    Host,
    NonNegativeInt,
    PositiveFloat,
    Processes,
    Seconds,
    Section,
)

LEARNER_KEYS = "learner"
"""Names the file of keys of the learner's site, so no sampler site may have the name."""
MAX_SITES = 1024
MAX_NAME = 64
SiteName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$", max_length=MAX_NAME)]


class SiteConfig(Section):
    """Configures one sampler site. What is left out is as in `student`, `teacher` and `rollout`."""

    servers: Processes | None = None
    """Student servers that the site starts. Null: student.servers."""
    concurrency: Concurrency | None = None
    """Prompts that the site samples at once. Null: rollout.concurrency."""
    scores: bool = True
    """Starts the run's teachers at the site, which scores what it samples. false: the learner's
    site scores its responses, on teachers of its own."""


class LinkConfig(Section):
    """Configures the link between the learner's site and each sampler site."""

    bytes_per_s: Annotated[int, Field(gt=0)] | None = None
    """Largest number of bytes a second that an end sends. Null: as many as the network takes."""
    compression: Annotated[int, Field(ge=0, le=19)] = 3
    """Level of zstd's compression of what is sent; 0: none. Raising it costs time for fewer
    bytes."""
    chunk_bytes: ByteCount = 4 * 2**20
    """Largest size in bytes of a chunk, after which a broken link goes on. The ends send smaller
    ones on a slow link by themselves."""
    outbox_bytes: ByteCount = 256 * 2**20
    """Largest size in bytes of what waits to be sent at an end; who sends more waits."""
    heartbeat_s: Seconds = 5.0
    """Time in seconds between two heartbeats."""
    silence_s: Seconds = 20.0
    """Time in seconds without any message after which an end takes the link for broken, and
    connects again."""


class SitesConfig(Section):
    """Configures sampler sites: each samples with its own version of the weights (docs/sites.md).

    `opd run` starts the learner's site, `opd site NAME CONFIG` a sampler site.
    """

    members: dict[SiteName, SiteConfig] = Field(
        default_factory=dict[SiteName, SiteConfig], max_length=MAX_SITES
    )
    """The sampler sites by name. Empty: none; student servers are part of the run."""
    host: Host = "127.0.0.1"
    """Host name or IPv4 address on which the learner's site listens."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 32000
    """Port on which the learner's site listens."""
    admission: Literal["permits", "open"] = "permits"
    """Which prompts sites are given. permits: those that schedule.max_staleness permits, so that
    nothing gets older than the schedule's bound. open: every site always has sites' concurrency of
    them (HeteroRL); what got older than the window is dropped."""
    max_staleness: NonNegativeInt = 64
    """With admission open: the window, in updates. A sample that is older is dropped (too_stale).
    Raising it drops less and trains on older samples."""
    max_delay_s: Seconds = 1800.0
    """Longest time in seconds from the end of sampling until a sample reaches the learner; one that
    took longer is dropped (too_late). When nothing has come for as long, one line says how each
    site does."""
    lost_after_s: Seconds = 60.0
    """Time in seconds after which the prompts of a site whose link is broken are given to others.
    Whichever sample comes first counts."""
    farewell_s: Seconds = 60.0
    """Longest time in seconds that the learner's site waits at the end of a run until every site
    that was part of it has heard so; one that is away then is named. Raising it lets sites end
    whose links are broken for longer."""
    learner_gone_after_s: Seconds = 21600.0
    """Time in seconds without the learner's site after which a sampler site ends by itself.
    Raising it leaves more time for opd run --resume, and keeps machines of a run that is over."""
    max_clock_skew_s: PositiveFloat = 30.0
    """Largest difference in seconds between the clocks of a site and of the learner's site; a site
    beyond it is refused."""
    quarantine_after: Annotated[int, Field(ge=1)] = 3
    """Malformed or forged samples of a site after which nothing more of it is trained on."""
    link: LinkConfig = LinkConfig()
    """The link between the learner's site and each sampler site."""
    weight_delays: DelayConfig = DelayConfig()
    """Delays new weights, for studies (HeteroRL's D_M): a site samples with what it has until a
    delay is over, then loads the newest version, and the next delay begins."""
    sample_delays: DelayConfig = DelayConfig()
    """Holds back every sample on its way to the learner, for studies."""

    @property
    def is_open(self) -> bool:
        """Returns whether sites always have all their slots full (open admission)."""
        return bool(self.members) and self.admission == "open"


def open_permits(batch_size: int, group: int, slots: int, window: int, sync_every: int) -> int:
    """Return the permits of open admission (docs/staleness.md): enough never to stop a site early.

    They are those of groups of which a site has a member, of the batches that wait and are in the
    window, and of those since the last weight sync.
    """
    return (slots + 1) * group + (window + 1 + sync_every) * batch_size
