"""Says what both ends of a run must have alike: configuration, model, tokenizer."""

from __future__ import annotations

import zlib
from pathlib import Path

from megatron_opd.config.digests import MODEL, matches, model_digest, value_digests
from megatron_opd.config.schema import Config

NOT_THE_SITES = (
    "run.*",
    "data.*",
    "student.*",
    "teacher",
    "teacher.*",
    "teachers",
    "teachers.*",
    "rollout.concurrency",
    "rollout.attempts",
    "scoring.concurrency",
    "scoring.attempts",
    "scoring.guard*",
    "verifier.*",
    "buffer.*",
    "schedule.*",
    "correction*",
    "reduction*",
    "learner.*",
    "weight_sync.*",
    "cluster.*",
    "workers.*",
    "sites.*",
    "security.*",
    "evaluation.*",
    "checkpoint.*",
    "metrics.*",
    "simulation*",
)
"""Keys that a site does not read, or that may differ between it and its learner."""
ALIKE_BESIDES = ("run.seed", "data.task*", "schedule.in_flight", "learner.routing_replay")
"""Keys in the sections above that must be alike."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


def site_digests(config: Config) -> dict[str, str]:
    """Return {dotted key: digest of its value} for what a site and its learner must have alike."""
    return {
        key: digest
        for key, digest in value_digests(config).items()
        if matches(key, ALIKE_BESIDES) or not matches(key, NOT_THE_SITES)
    }


def model_crc32(model: Path) -> int:
    """Return a checksum that tells one checkpoint from another. ValueError: it cannot be read."""
    return zlib.crc32(model_digest(model).encode())


def tokenizer_crc32(model: Path) -> int:
    """Return a checksum of a model's vocabulary. ValueError: it cannot be read."""
    crc = 0
    for name in TOKENIZER_FILES:
        try:
            crc = zlib.crc32(name.encode() + b"\0" + (model / name).read_bytes(), crc)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ValueError(f"{MODEL}: cannot read {model / name}: {error.strerror}") from None
    return crc
