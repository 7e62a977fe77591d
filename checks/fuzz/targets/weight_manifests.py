"""Manifests of weights on disk, and what a server is told of their place -> what it would read."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree
from sglang_bridge.weights.manifest import Array, BadManifest, File, Manifest, Slice, checksum
from sglang_bridge.weights.manifest import decode as decode_manifest

NAME = "000004-version-3"
ARRAY = Array(64, 4, 8, (123,))
SLICES = (
    Slice("model.norm.weight", 0, 0, 4, (4,), "whole", (ARRAY,)),
    Slice("lm_head.weight", 0, 0, 4, (4, 2), "same", ()),
)
WHOLE = Manifest(
    NAME, 3, "000003-version-2", "bfloat16", (File("rank00000.safetensors", 96, 64, 5, SLICES),)
)


def call(text: bytes) -> Manifest:
    """Read it."""
    return decode_manifest(text, NAME)


def oracle(text: bytes, found: Manifest) -> str | None:
    """All arrays lie in their files, no name leads elsewhere, and all is what was written."""
    body = text.rpartition(b"\n")[0].rpartition(b"\n")[0]
    if msgspec.json.decode(msgspec.json.encode(found), type=Manifest) != found:
        return "a manifest is another one when it is written again"
    tree: Any = json.loads(body)
    if found.name != NAME or found.version != 3 or tree["name"] != NAME:
        return "the manifest of another version"
    for file in found.files:
        if Path(file.name).name != file.name or file.name in (".", ".."):
            return "a file elsewhere"
        if not 0 <= file.head_bytes <= file.num_bytes:
            return "a head beyond its file"
        for piece in file.slices:
            full = piece.shape[piece.dim] if 0 <= piece.dim < len(piece.shape) else -1
            if not 0 <= piece.start <= piece.start + piece.length <= full:
                return "a slice beyond its tensor"
            for array in piece.arrays:
                if min(array.at, array.rows, array.row_bytes) < 0:
                    return "an array that is none"
                if array.at + array.rows * array.row_bytes > file.num_bytes:
                    return "an array beyond its file"
    return None


def sealed(body: bytes) -> bytes:
    """The text of a manifest with this body."""
    return body + f"\n{checksum(body):08x}\n".encode()


BODY = msgspec.json.encode(WHOLE)
TREES, BODIES = damaged_tree([json.loads(BODY)], most=2), damaged_bytes([BODY], most=2)
TEXTS = damaged_bytes([sealed(BODY)], most=1)


def make(rng: Random) -> bytes:
    """A manifest after damage; mostly sealed again, as its checksum keeps nobody out."""
    kind = rng.random()
    if kind < 0.7:
        return sealed(json.dumps(TREES(rng)).encode())
    return sealed(BODIES(rng)) if kind < 0.9 else TEXTS(rng)


TARGET = Target("weight_manifests", make, call, (BadManifest,), oracle)
