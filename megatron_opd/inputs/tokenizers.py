"""Loads a checkpoint's tokenizer, and checks that it is there and belongs to the model.

Transformers makes an empty tokenizer of a directory without one; here that is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_opd.config.wording import shown
from megatron_opd.data.render import is_failure, said
from megatron_opd.data.response_text import Encode
from megatron_opd.data.without_torch import transformers_for_tokenizers
from megatron_opd.data.written_tokenizer import cut_as_written
from megatron_opd.errors import UserError
from megatron_opd.metrics.token_texts import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "vocab.json")
MOST_ID = 2**24
"""Largest id of a vocabulary. Loading one with an id of 2**31 took the library 22 s of processor
time; the largest vocabularies in use have a few hundred thousand ids."""
SETTINGS = "tokenizer_config.json"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")


def has_tokenizer(path: Path) -> bool:
    """Return whether `path` holds a vocabulary."""
    return any((path / name).is_file() for name in FILES)


def load_tokenizer(path: Path, key: str) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer from local files; `key` is the config key that named it.

    Raises UserError: no vocabulary, a config.json or tokenizer that transformers refuses.
    """
    if not has_tokenizer(path):
        raise UserError(f"{key}: {path} has no tokenizer: none of {', '.join(FILES)} is there")
    for name in VOCABULARIES:
        if (path / name).is_file():
            _check_ids(key, path / name)
    _check_code(key, path)
    library = transformers_for_tokenizers()
    config, tokenizers = library.AutoConfig, library.AutoTokenizer
    _checked(f"{key}: transformers refuses {path / 'config.json'}", config, path)
    tokenizer = _checked(f"{key}: cannot load the tokenizer in {path}", tokenizers, path)
    if not tokenizer.get_vocab():
        raise UserError(f"{key}: the tokenizer in {path} has an empty vocabulary")
    return cut_as_written(tokenizer, path)


def _check_code(key: str, path: Path) -> None:
    """Raise UserError for a tokenizer that only code beside it can load."""
    try:
        tree: Any = json.loads((path / SETTINGS).read_bytes())
        needs = "AutoTokenizer" in tree["auto_map"] and not (path / "tokenizer.json").is_file()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # none, or none that names code
    if needs:
        raise UserError(
            f"{key}: the tokenizer in {path} needs code of its own ({SETTINGS}: auto_map), which "
            "is never run: convert it once, where you trust that code, to a tokenizer.json "
            "(transformers' convert_slow_tokenizer, or TikTokenConverter for tiktoken files, then "
            "save_pretrained of a PreTrainedTokenizerFast)"
        )


def default_end(path: Path) -> Any:
    """Return the end token that transformers takes for a config.json that names none."""
    load = transformers_for_tokenizers().AutoConfig.from_pretrained
    config = load(path, local_files_only=True, trust_remote_code=False)
    return getattr(config, "eos_token_id", config.get_text_config().eos_token_id)


def _check_ids(key: str, path: Path) -> None:
    """Raise UserError if tokenizer.json is not JSON or holds an id beyond MOST_ID."""
    try:
        tree: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UserError(f"{key}: cannot read {path}: {said(error)}") from None
    model = tree.get("model") if isinstance(tree, dict) and path.name == "tokenizer.json" else tree
    words = model.get("vocab") if isinstance(model, dict) and model is not tree else model
    ids = list(words.values()) if isinstance(words, dict) else []
    added = tree.get("added_tokens") if isinstance(tree, dict) else None
    tokens = added if isinstance(added, list) else []
    ids += [token.get("id") for token in tokens if isinstance(token, dict)]
    large = next((i for i in ids if isinstance(i, int) and i > MOST_ID), None)
    if large is not None:
        raise UserError(f"{key}: an id of {path} must be at most {MOST_ID}, got {shown(large, 40)}")


def _checked(problem: str, kind: Any, path: Path) -> Any:
    try:
        return kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # transformers raises what its parts raise, Rust panics too
        if not is_failure(error):
            raise
        raise UserError(f"{problem}: {said(error)}") from None


def make_encode(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Make what cuts text into token ids, and adds none."""
    return lambda text: [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Make what turns token ids into text as they stand, special tokens included."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return decode
    # ten times faster than the wrapper for a token at a time
    return lambda ids: backend.decode(list(ids), skip_special_tokens=False)
