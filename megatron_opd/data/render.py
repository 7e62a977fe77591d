"""Prompts -> token ids, through a chat template or as they stand.

Invariant: whatever a tokenizer or template of unknown origin raises becomes one ValueError line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_opd.config.wording import line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two user messages that no template may render alike.
PROBES = ("What is 2 + 3?", "Name a colour.")


def render_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> list[list[int]]:
    """The token ids of every text. ValueError: the tokenizer or its template fails."""
    if not texts:
        return []
    if not chat_template:
        return _token_ids(tokenizer, list(texts), special=True)
    check_template(tokenizer)
    # the template writes the special tokens itself
    return _token_ids(tokenizer, [_render(tokenizer, text) for text in texts], special=False)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render two messages. ValueError: there is no template, it fails, or it drops the message."""
    if tokenizer.chat_template is None:
        raise ValueError("data.chat_template is true but the tokenizer has no chat template")
    one, other = (_render(tokenizer, text) for text in PROBES)
    if one == other:
        raise ValueError(
            "data.chat_template: the tokenizer's chat template renders every prompt alike: it "
            "leaves out the user's message"
        )


def _render(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)
    except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
        raise ValueError(
            f"data.chat_template: the tokenizer's chat template fails: {said(error)}"
        ) from None


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool
) -> list[list[int]]:
    try:
        found: Any = tokenizer(texts, add_special_tokens=special)["input_ids"]
    except BaseException as error:  # the Rust side panics past Exception
        if not is_failure(error):
            raise
        raise ValueError(f"the tokenizer cannot encode the prompts: {said(error)}") from None
    return found


def is_failure(error: BaseException) -> bool:
    """Whether it is an error, or a panic of a Rust extension, and no signal or exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def said(error: BaseException) -> str:
    """An error of a library on one line, its type included."""
    return f"{type(error).__name__}: {line(error)}"
