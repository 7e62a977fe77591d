"""Turns prompts into token ids, through a chat template or as they are.

Invariant: whatever a tokenizer or template of unknown origin raises becomes one ValueError line,
and so does one that does not end: they are programs written by the checkpoint's author.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_opd.config.wording import line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two user messages that no template may render alike.
PROBES = ("What is 2 + 3?", "Name a colour.")
LEAST_S = 60.0
"""Seconds that a tokenizer and its template may take, however little there is to read."""
CHARACTERS_PER_S = 5_000
"""Characters that allow one more second: a hundredth of the demo tokenizer's speed."""

ResultT = TypeVar("ResultT")


def render_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> list[list[int]]:
    """Return the token ids of every text.

    ValueError: the tokenizer or its template fails, or hangs.
    """

    def rendered() -> list[list[int]]:
        if not chat_template:
            return _token_ids(tokenizer, list(texts), special=True)
        check_template(tokenizer)
        # the template writes the special tokens itself
        return _token_ids(tokenizer, [_render(tokenizer, text) for text in texts], special=False)

    if not texts:
        return []
    characters = sum(map(len, texts))
    limit_s = LEAST_S + characters / CHARACTERS_PER_S
    try:
        return within(limit_s, rendered)
    except Unfinished:
        what = "tokenizer's chat template" if chat_template else "tokenizer"
        raise ValueError(
            f"student.model: its {what} must read {len(texts)} prompts of {characters} characters "
            f"within {limit_s:.0f} s, and has not finished; look for an "
            "endless loop or expression in it"
        ) from None


class Unfinished(Exception):
    """Reports a call that has not ended within its time."""


def within(limit_s: float, call: Callable[[], ResultT]) -> ResultT:
    """Return what `call` returns or raises. Unfinished: it has not ended after `limit_s`.

    The call is left running then, in a thread that does not keep the process from ending, because
    foreign code cannot be stopped from inside the process.
    """
    future: Future[ResultT] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            future.set_exception(error)

    threading.Thread(target=work, name="render", daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise
        raise Unfinished from None


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
    """Return whether it is an error or a panic of a Rust extension, not a signal or an exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def said(error: BaseException) -> str:
    """Return an error of a library on one line, its type included."""
    return f"{type(error).__name__}: {line(error)}"
