"""Loads transformers for its tokenizers alone: without torch, in a process that asks for that.

Transformers imports torch beside a tokenizer wherever torch is installed. In a process of `opd`,
which has no use for it, that was two thirds of the time of `opd check` and 0.36 GB.
"""

from __future__ import annotations

from types import ModuleType

_left_out = False


def leave_torch_out() -> None:
    """Let `transformers_for_tokenizers` leave torch out, in a process that uses no model of it."""
    global _left_out
    _left_out = True


def transformers_for_tokenizers() -> ModuleType:
    """Return transformers. Where torch is left out it takes it for missing from now on."""
    import transformers
    import transformers.utils
    from transformers.utils import import_utils

    if _left_out:
        # modules of transformers take the function from either place when they are imported
        import_utils.is_torch_available = _no
        transformers.utils.is_torch_available = _no
    return transformers


def _no() -> bool:
    return False
