"""Reads a config.json as the product does, and as transformers does."""

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from megatron_opd.models.spec import ModelSpec, read_model_spec


def by_transformers(path: Path) -> Any:
    """transformers' configuration, or None where it refuses the file."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return AutoConfig.from_pretrained(path)
        except (
            StrictDataclassError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ):
            return None


def read(config: dict[str, Any]) -> tuple[ModelSpec | str, Any]:
    """What we read, or why we refuse, and what transformers reads."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        theirs = by_transformers(Path(name))
        try:
            return read_model_spec(Path(name)), theirs
        except ValueError as error:
            return str(error), theirs


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keeps transformers from saying what it thinks of a configuration."""
    transformers_logging.set_verbosity(logging.CRITICAL)
    yield
    transformers_logging.set_verbosity(logging.WARNING)
