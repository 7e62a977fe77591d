"""Checks that a learner was given exactly what its controller was, with one digest per key.

Every key of the configuration is compared unless NOT_THE_LEARNERS lists it, so that a new key is
compared from the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from megatron_opd.config.section import Section
from megatron_opd.config.tree import ConfigTree

MODEL = "student.model"
NOT_THE_LEARNERS = (
    "run.dir",
    "data.train",
    "data.heldout*",
    "data.task",
    "data.tasks*",
    "data.*_key",
    "data.epochs",
    "data.chat_template",
    "data.system_prompt",
    "data.chat_template_kwargs*",
    "data.continue_assistant",
    "data.shuffle",
    "data.curriculum*",
    "verifier.*",
    "student.*",
    "teacher",
    "teacher.*",
    "teachers",
    "teachers.*",
    "rollout.concurrency",
    "rollout.attempts",
    "rollout.stop",
    "scoring.*",
    "selection.*",
    "schedule.*",
    "weight_sync.timeout_s",
    "weight_sync.host",
    "weight_sync.directory",
    "weight_sync.verify_every",
    "evaluation.*",
    "checkpoint.*",
    "metrics.*",
    "learner.listen_host",
    "learner.listen_port",
    "learner.threads",
    "learner.timeout_s",
    "learner.gpu_memory_gib",
    "learner.gpus",
    "learner.mismatch_limit",
    "cluster.*",
    "security.*",
    "workers.*",
    "sites.*",
)
"""Keys that a learner does not read, or that may differ between it and its controller."""
READ_BY_LEARNERS = ("teacher.source.*", "teachers.*.source.*")
"""What a learner reads of sections that are not its own otherwise: it keeps averages."""
SAMPLE_BYTES = 65_536


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: JSON value} of a nested mapping; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = flat(cast(Mapping[str, Any], value)) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": each for key, each in inner.items()} or {name: value}
    return found


def learner_digests(config: ConfigTree) -> dict[str, str]:
    """Return {dotted key: digest of its value} for what a learner reads.

    MODEL stands for the content of the checkpoint, whose path may differ between machines.
    ValueError: the checkpoint cannot be read.
    """
    found = value_digests(config).items()
    kept = {
        key: digest
        for key, digest in found
        if matches(key, READ_BY_LEARNERS) or not matches(key, NOT_THE_LEARNERS)
    }
    return kept | {MODEL: model_digest(config.student.model)}


def value_digests(config: Section) -> dict[str, str]:
    """Return {dotted key: digest of its value} for every key."""
    return {
        key: _digest(json.dumps(value, sort_keys=True).encode())
        for key, value in flat(config.model_dump(mode="json")).items()
    }


def differing_keys(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the keys whose digests differ, or that only one side has, in order."""
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted key is listed."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def model_digest(model: Path) -> str:
    """Return a digest that tells one checkpoint from another without reading all of it.

    It covers config.json and, for every file of weights, its size and its first and last
    SAMPLE_BYTES: the names, shapes and types of all tensors, and some of the values. ValueError: no
    config.json can be read.
    """
    parts: list[bytes] = []
    try:
        parts.append((model / "config.json").read_bytes())
        for file in sorted(model.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as stream:
                head = stream.read(SAMPLE_BYTES)
                stream.seek(max(0, size - SAMPLE_BYTES))
                parts += [str(size).encode(), head, stream.read(SAMPLE_BYTES)]
    except OSError as error:
        raise ValueError(f"{MODEL}: cannot read {error.filename}: {error.strerror}") from None
    return _digest(b"\0".join(parts))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
