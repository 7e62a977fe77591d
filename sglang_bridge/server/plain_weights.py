"""Decides when a server de-quantises its checkpoint as it loads it.

A student's server always does, as weight syncs bring plain weights; so does one that quantises
itself (server/quantised.py), and every server on a CPU, where SGLang has no kernels for such
formats. Any other teacher on GPUs serves the checkpoint as it is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sglang_bridge.config_file import config_of
from sglang_bridge.server.spec import MODEL_KEY_VARIABLE, PLAIN_VARIABLE, REFUSED
from sglang_bridge.weights.checkpoint_formats import (
    CONFIG_KEYS,
    CheckpointFormat,
    checkpoint_format,
)

OVERRIDE = "--json-model-override-args"


def format_to_undo(model: Path, *, cuda: bool) -> CheckpointFormat | None:
    """Return the format that the server undoes; None: it loads the checkpoint as it is.

    ValueError, one line: it would have to, and does not know the format.
    """
    if cuda and PLAIN_VARIABLE not in os.environ:
        return None
    return checkpoint_format(config_of(model))


def as_plain(arguments: list[str], model: Path, *, cuda: bool) -> list[str]:
    """Return the arguments of a server whose SGLang takes the model for one that is not quantised.

    SystemExit, with one line for whoever started it: see format_to_undo.
    """
    try:
        undone = format_to_undo(model, cuda=cuda)
    except ValueError as error:
        key = os.environ.get(MODEL_KEY_VARIABLE, "--model-path")
        sys.exit(f"{REFUSED}{key}: {model}: {error}")
    if undone is None:
        return arguments
    kept: list[str] = []
    given: dict[str, object] = {}
    words = iter(arguments)
    for word in words:
        name, joined, value = word.partition("=")
        if name == OVERRIDE:
            given |= json.loads(value if joined else next(words, "{}"))
        else:
            kept.append(word)
    return [*kept, OVERRIDE, json.dumps(given | dict.fromkeys(CONFIG_KEYS))]
