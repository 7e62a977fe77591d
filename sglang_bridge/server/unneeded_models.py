"""Leaves out SGLang's modules of architectures that a server's model does not have.

SGLang imports all of its some 200 model files in every scheduler before it loads one model: 3
seconds of CPU time a start, and their memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from sglang_bridge.config_file import config_of
from sglang_bridge.language_models import text_config

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's own setting: names of model files, without .py, that it does not import."""
FALLBACK = "transformers"
"""The file that runs an architecture by the transformers library; SGLang may fall back to it."""
OTHER_MODELS = ("--speculative-", "--json-model-override-args", "--model-impl")
"""Starts of options that bring in an architecture which the model's config does not name."""


def unneeded(model: Path, arguments: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of SGLang's model files that do not mention the model's architecture.

    A file that only mentions it is kept: SGLang turns some names into others of the same ending
    (MixtralForCausalLM into QuantMixtralForCausalLM). Empty, so that SGLang imports all, when the
    architecture is not known, no file mentions it, or an option may bring in another.
    """
    if any(argument.startswith(OTHER_MODELS) for argument in arguments):
        return ()
    try:
        names = [str(name) for name in text_config(config_of(model))["architectures"]]
    except (ValueError, KeyError, TypeError):
        return ()  # SGLang says what is wrong with the model
    texts = {
        file.stem: file.read_text(encoding="utf-8")
        for file in _directory().glob("*.py")
        if not file.stem.startswith("_")
    }
    needed = {stem for stem, text in texts.items() if any(name in text for name in names)}
    if not needed:
        return ()
    return tuple(sorted(texts.keys() - needed - {FALLBACK}))


def _directory() -> Path:
    """Returns where SGLang's model files are, without importing it."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sglang is not installed", name="sglang")
    return Path(found.origin).parent / "srt" / "models"
