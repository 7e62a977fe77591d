"""Turns prompts into token ids, through a chat template or as they are.

Invariant: whatever a tokenizer or template of unknown origin raises becomes one ValueError line, or
the fault of a row, and so does one that does not end: they are programs written by the checkpoint's
author.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_opd.config.wording import line
from megatron_opd.data.faults import Unusable
from megatron_opd.data.messages import ASSISTANT, SYSTEM, USER, Chat, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two messages that no template may render alike.
PROBES = ("What is 2 + 3?", "Name a colour.")
LEAST_S = 60.0
"""Seconds that a tokenizer and its template may take, however little there is to read."""
CHARACTERS_PER_S = 5_000
"""Characters that allow one more second: a hundredth of the demo tokenizer's speed."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Says how prompts become text.

    chat_template: wrap them as messages and open the assistant's turn; otherwise a prompt is its
    text. system_prompt: put in front of every prompt that has no system message of its own.
    template_kwargs: variables of the template, such as enable_thinking.
    """

    chat_template: bool = False
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def chat_of(self, prompt: str | Chat) -> Chat:
        """Return the messages of a prompt, the system prompt included."""
        chat = (Message(USER, prompt),) if isinstance(prompt, str) else prompt
        if self.system_prompt is None or chat[0].role == SYSTEM:
            return chat
        return (Message(SYSTEM, self.system_prompt), *chat)


def render_prompts(
    prompts: Sequence[str | Chat], tokenizer: PreTrainedTokenizerBase, how: Rendering
) -> list[list[int] | Unusable]:
    """Return the token ids of every prompt, or why the template does not take it.

    A chat that ends with an assistant's message is continued. Lists of messages need
    how.chat_template. ValueError: the tokenizer or its template fails on any prompt, leaves out
    what it is given, or hangs.
    """

    def rendered() -> list[list[int] | Unusable]:
        if not how.chat_template:
            texts = [str(prompt) for prompt in prompts]
            return list(_token_ids(tokenizer, texts, special=True))
        chats = [how.chat_of(prompt) for prompt in prompts]
        check_template(tokenizer, how, systems=any(chat[0].role == SYSTEM for chat in chats))
        found = [_rendered(tokenizer, chat, how) for chat in chats]
        texts = [text for text in found if isinstance(text, str)]
        # the template writes the special tokens itself
        ids = iter(_token_ids(tokenizer, texts, special=False) if texts else [])
        return [next(ids) if isinstance(text, str) else text for text in found]

    if not prompts:
        return []
    characters = sum(len(m.content) for prompt in prompts for m in how.chat_of(prompt))
    limit_s = LEAST_S + characters / CHARACTERS_PER_S
    try:
        return within(limit_s, rendered)
    except Unfinished:
        what = "tokenizer's chat template" if how.chat_template else "tokenizer"
        raise ValueError(
            f"student.model: its {what} must read {len(prompts)} prompts of {characters} "
            f"characters within {limit_s:.0f} s, and has not finished; look for an "
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


def check_template(
    tokenizer: PreTrainedTokenizerBase, how: Rendering, *, systems: bool = False
) -> None:
    """Render messages that no template may render alike.

    systems: a prompt has a system message. ValueError: there is no template, it fails, or it drops
    a message.
    """
    if tokenizer.chat_template is None:
        raise ValueError("data.chat_template is true but the tokenizer has no chat template")
    plain = Rendering(True, None, how.template_kwargs)
    one, other = (_render(tokenizer, plain.chat_of(text), how) for text in PROBES)
    if one == other:
        raise ValueError(
            "data.chat_template: the tokenizer's chat template renders every prompt alike: it "
            "leaves out the user's message"
        )
    if systems:
        _check_system(tokenizer, how)


def _check_system(tokenizer: PreTrainedTokenizerBase, how: Rendering) -> None:
    given = how.system_prompt is not None
    key = "data.system_prompt" if given else "data.chat_template"
    chats = [(Message(SYSTEM, text), Message(USER, PROBES[0])) for text in PROBES]
    try:
        one, other = (_apply(tokenizer, chat, how) for chat in chats)
    except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
        if given:
            raise ValueError(
                f"{key}: the tokenizer's chat template takes no system message: {said(error)}; "
                "leave it null"
            ) from None
        return  # the rows that have one are faults of their own
    if one == other:
        raise ValueError(
            f"{key}: the tokenizer's chat template leaves out system messages; "
            + ("leave it null" if given else "put their text into the user's message")
        )


def unread_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names that the chat template does not mention, and so cannot read."""
    template: Any = tokenizer.chat_template
    sources = template.values() if isinstance(template, dict) else [template or ""]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    return [name for name in kwargs if name not in words]


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, how: Rendering) -> str | Unusable:
    try:
        return _apply(tokenizer, chat, how)
    except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
        return Unusable("bad_chat", f"the chat template does not take it: {said(error)}")


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, how: Rendering) -> str:
    try:
        return _apply(tokenizer, chat, how)
    except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
        raise ValueError(
            f"data.chat_template: the tokenizer's chat template fails: {said(error)}"
        ) from None


def _apply(tokenizer: PreTrainedTokenizerBase, chat: Chat, how: Rendering) -> str:
    continued = chat[-1].role == ASSISTANT
    rendered = tokenizer.apply_chat_template(
        [message._asdict() for message in chat],
        tokenize=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        **how.template_kwargs,
    )
    return str(rendered)


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
