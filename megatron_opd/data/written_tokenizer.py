"""Makes a tokenizer cut text as the tokenizer.json of its checkpoint says.

Invariant: blanks, line ends and digits are cut as the file says, whatever class is named beside it.
Classes of transformers 5 such as LlamaTokenizer and GPT2Tokenizer take the vocabulary of the file
alone and cut text in their own way, but many checkpoints name one of them beside another way of
cutting: those of DeepSeek's and SmolLM's do. SGLang's servers restore the file's way too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_OPTIONS = ("add_prefix_space", "prepend_scheme", "trim_offsets")
"""What tokenizer_config.json may say otherwise, where a class heeds it; offsets are unused."""
OF_MODEL = ("byte_fallback", "fuse_unk", "ignore_merges")


def cut_as_written(tokenizer: PreTrainedTokenizerBase, path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the checkpoint at `path`, its way of cutting the file's.

    A file that names no way to cut text, as those made of Llama 2's, leaves it to the class.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    file = path / "tokenizer.json"
    if backend is None or not file.is_file():
        return tokenizer
    tree: Any = json.loads(file.read_bytes())
    if not tree.get("pre_tokenizer") or _steps(tree) == _steps_of(backend):
        return tokenizer
    from tokenizers import Tokenizer

    written: Any = Tokenizer.from_file(str(file))
    backend.normalizer, backend.pre_tokenizer = written.normalizer, written.pre_tokenizer
    backend.decoder, backend.model = written.decoder, written.model
    return tokenizer


def _steps(tree: Mapping[str, Any]) -> list[Any]:
    model: Mapping[str, Any] = tree.get("model") or {}
    flags = {name: bool(model.get(name)) for name in OF_MODEL}
    return [_flat(tree.get("normalizer")), _flat(tree.get("pre_tokenizer")), flags]


def _steps_of(backend: Any) -> list[Any]:
    parts = {
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer")
        if (part := getattr(backend, name)) is not None
    }
    flags = {name: getattr(backend.model, name, False) for name in OF_MODEL}
    return _steps({**parts, "model": flags})


def _flat(step: Mapping[str, Any] | None) -> list[Any]:
    """Return a step and those that it holds as one list, without what options may change."""
    if step is None:
        return []
    held = step.get("normalizers", step.get("pretokenizers"))
    if held is not None:
        return [each for one in held for each in _flat(one)]
    return [{name: value for name, value in step.items() if name not in OF_OPTIONS}]
