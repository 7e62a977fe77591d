"""Turns prompts into token ids, through a chat template or as they are.

Invariant: whatever a tokenizer or template of unknown origin raises becomes one ValueError line, or
the fault of a row, and so does one that does not end: they are programs written by the checkpoint's
author.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megatron_opd.config.wording import line, shown
from megatron_opd.data.chats import (
    ASSISTANT,
    LEADING,
    SYSTEM,
    USER,
    Chat,
    ChatMessage,
    RowChat,
    chat_like,
)
from megatron_opd.data.faults import Unusable
from megatron_opd.data.literal import LiteralEncoder
from megatron_opd.data.marks import JSON_TEXT, Mark, Marker, alike, changed, continued, probe
from megatron_opd.data.spoken import apply_template, unread, without
from megatron_opd.data.template import chance_in, names_in, sources, this_moment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two messages that no template may render alike.
PROBES = ("What is 2 + 3?", "Name a colour.")
LEAST_S = 60.0
"""Seconds that a tokenizer and its template may take, however little there is to read."""
CHARACTERS_PER_S = 5_000
"""Characters that allow one more second: a hundredth of the demo tokenizer's speed."""

BEFORE = 20
"""Characters shown of what two texts begin with before they differ."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Says how prompts become text.

    chat_template: wrap them as messages and open the assistant's turn; otherwise a prompt is its
    text. system_prompt: put in front of every prompt that has no system message of its own.
    template_kwargs: variables of the template, such as enable_thinking. clock: the moment that a
    template is given whenever it asks for the time. section: of the configuration that says so,
    data or a teacher's.
    """

    chat_template: bool = False
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clock: datetime = field(default_factory=this_moment)
    section: str = "data"

    @property
    def key(self) -> str:
        """Returns the key that names the template."""
        return f"{self.section}.chat_template"

    @property
    def model_key(self) -> str:
        """Returns the key that names the model whose tokenizer it is."""
        return "student.model" if self.section == "data" else f"{self.section}.model"

    def chat_of(self, prompt: str | Chat) -> Chat:
        """Return the messages of a prompt, the system prompt included."""
        chat = (ChatMessage(USER, prompt),) if isinstance(prompt, str) else prompt
        if self.system_prompt is None or chat[0].role in LEADING:
            return chat
        return chat_like(chat, (ChatMessage(SYSTEM, self.system_prompt), *chat))


class Rendered(NamedTuple):
    """Holds the token ids of a prompt, and what is unexpected about them."""

    ids: list[int]
    marks: tuple[Mark, ...] = ()


class AnsweredTurn(NamedTuple):
    """Holds an answer as the template writes it behind its prompt.

    prompt: the ids before it. text: the answer's, so that it begins as responses do. behind: what
    the template puts behind that. marks: what is unexpected.
    """

    prompt: list[int]
    text: str
    behind: str
    marks: tuple[Mark, ...]


def render_prompts(
    prompts: Sequence[str | Chat], tokenizer: PreTrainedTokenizerBase, how: Rendering
) -> list[Rendered | Unusable]:
    """Return the token ids of every prompt, or why the template does not take it; see Renderer."""
    return Renderer(tokenizer, how).render(prompts) if prompts else []


class Renderer:
    """Turns prompts into token ids with one tokenizer.

    Made once, as what it finds out about the tokenizer and its template costs several renderings.
    ValueError, also of `render`: the tokenizer or its template fails on any prompt, leaves out what
    it is given, comes out otherwise every time, or hangs. literal: keeps control tokens out of the
    messages of chats; None: a text that spells one is read as it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        how: Rendering,
        literal: LiteralEncoder | None = None,
    ) -> None:
        self._tokenizer, self._how, self._literal = tokenizer, how, literal
        self._systems = how.system_prompt is not None  # whether the template was shown to take them
        self._probed: dict[tuple[str, ...], str | None] = {}
        self._drops: dict[tuple[object, ...], set[tuple[int, str]]] = {}

        def found_out() -> tuple[Marker, str]:
            try:
                marker = Marker(tokenizer)
            except BaseException as error:  # the Rust side panics past Exception
                if not is_failure(error):
                    raise
                raise ValueError(f"the tokenizer cannot encode a text: {said(error)}") from None
            if not how.chat_template:
                return marker, ""
            check_template(tokenizer, how, systems=self._systems)
            return marker, self._opening(marker)

        self._marker, self._turn = self._within(0, 0, found_out)

    def render(self, prompts: Sequence[str | Chat]) -> list[Rendered | Unusable]:
        """Return the token ids of every prompt, or why the template does not take it.

        A chat that ends with an assistant's message is continued. Lists of messages need
        how.chat_template.
        """
        if not prompts:
            return []
        characters = sum(len(m.content) for prompt in prompts for m in self._how.chat_of(prompt))
        render = self._chats if self._how.chat_template else self._texts
        return self._within(len(prompts), characters, lambda: render(prompts))

    def answered(self, prompt: str | Chat, answer: ChatMessage) -> AnsweredTurn | Unusable:
        """Return an answer as the template writes it behind its prompt."""
        (rendered,) = self.render([prompt])
        if isinstance(rendered, Unusable):
            return rendered
        asked = self._chat_of(prompt)
        chat = chat_like(asked, (*asked, answer))
        found = self._within(1, len(answer.content), lambda: self._turn_of(chat))
        if isinstance(found, Unusable):
            return found
        text, behind, marks = found
        return AnsweredTurn(rendered.ids, text, behind, (*rendered.marks, *marks))

    def written(self, chat: Chat) -> str | None:
        """Return the text of a chat that goes on, None for one that the template does not take."""
        asked = self._chat_of(chat)
        characters = sum(len(message.content) for message in asked)
        return self._within(1, characters, lambda: self._or_none(asked))

    def _turn_of(self, chat: Chat) -> tuple[str, str, list[Mark]] | Unusable:
        *before, answer = chat
        try:
            opened = _apply(self._tokenizer, chat_like(chat, before), self._how)
            closed = _apply(self._tokenizer, chat, self._how, answer=False)
        except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
            return Unusable("bad_chat", f"the chat template does not take it: {said(error)}")
        if not closed.startswith(opened):
            same = max(alike(closed, opened) - BEFORE, 0)
            return Unusable(
                "bad_chat",
                f"the chat template begins an answer with {shown(opened[same:], 60)} and writes "
                f"this one with {shown(closed[same:], 60)}: what is learnt would not be what is "
                "sampled; name a template file in which both are alike",
            )
        turn = closed.removeprefix(opened)
        missed = unread(self._tokenizer, chat, self._dropped(chat, closed, answer=False))
        if isinstance(missed, Unusable):
            return missed
        own = [mark for mark in missed if mark.what.startswith(f"message {len(chat)} ")]
        if any(mark.what.endswith("tool_calls") for mark in own):
            return Unusable(
                "bad_chat",
                "the chat template does not write the answer's tool_calls; leave the example out, "
                "or name a template file that writes them",
            )
        for content in (answer.content, answer.content.strip()):
            # it may begin in what the template begins answers with, such as <think>
            end = closed.rfind(content) + len(content) - len(opened) if content else 0
            if content in turn or (content in closed and end > 0):
                return turn[:end], turn[end:], own
        return Unusable(
            "bad_chat",
            f"the chat template does not write the answer {shown(answer.content, 60)} as it is",
        )

    def _within(self, prompts: int, characters: int, call: Callable[[], ResultT]) -> ResultT:
        limit_s = LEAST_S + characters / CHARACTERS_PER_S
        try:
            return within(limit_s, call)
        except Unfinished:
            what = "tokenizer's chat template" if self._how.chat_template else "tokenizer"
            amount = f"{prompts} prompts of {characters} characters" if prompts else "a short text"
            raise ValueError(
                f"{self._how.model_key}: its {what} must read {amount} within {limit_s:.0f} s, and "
                "has not finished; look for an endless loop or expression in it"
            ) from None

    def _texts(self, prompts: Sequence[str | Chat]) -> list[Rendered | Unusable]:
        framed = _token_ids(self._tokenizer, [str(prompt) for prompt in prompts], special=True)
        found = [self._marker.unframed(ids) for ids in framed]
        return [Rendered(ids, tuple(marks)) for ids, marks in found]

    def _chats(self, prompts: Sequence[str | Chat]) -> list[Rendered | Unusable]:
        chats = [self._chat_of(prompt) for prompt in prompts]
        if not self._systems and any(chat[0].role == SYSTEM for chat in chats):
            check_system(self._tokenizer, self._how)
            self._systems = True
        found = [self._text(*each) for each in zip(prompts, chats, strict=True)]
        texts = [each[0] for each in found if not isinstance(each, Unusable)]
        # the template writes the special tokens itself
        ids = iter(self._ids(texts) if texts else [])
        rendered: list[Rendered | Unusable] = []
        for chat, each in zip(chats, found, strict=True):
            if isinstance(each, Unusable):
                rendered.append(each)
                continue
            own = next(ids)
            marks = self._marker.templated([message.content for message in chat], own)
            rendered.append(Rendered(own, (*each[1], *marks)))
        return rendered

    def _chat_of(self, prompt: str | Chat) -> Chat:
        chat = self._how.chat_of(prompt)
        return chat if self._literal is None else self._literal.marked(chat)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if self._literal is None:
            return _token_ids(self._tokenizer, texts, special=False)
        return [self._literal.ids(text) for text in texts]

    def _text(self, prompt: str | Chat, chat: Chat) -> tuple[str, list[Mark]] | Unusable:
        if self._turn and isinstance(prompt, str) and self._turn in prompt:
            return Unusable(
                "templated",
                f"it holds {self._turn!r} already, which the chat template writes: give messages, "
                f"or set {self._how.key}: false",
            )
        try:
            text = _apply(self._tokenizer, chat, self._how)
        except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
            return Unusable("bad_chat", f"the chat template does not take it: {said(error)}")
        missed = unread(self._tokenizer, chat, self._dropped(chat, text))
        if isinstance(missed, Unusable):
            return missed
        if isinstance(prompt, RowChat) and prompt.written:
            missed.append(Mark(JSON_TEXT, "a list as text"))
        return text, [*missed, *self._changes(chat, text)]

    def _opening(self, marker: Marker) -> str:
        """Return what the template begins an answer with, where a special token is in it."""
        chat = (ChatMessage(USER, PROBES[0]),)
        opened = _render(self._tokenizer, chat, self._how)
        closed = self._or_none(chat, answer=False)
        if closed is None or not opened.startswith(closed):
            return ""
        opening = opened.removeprefix(closed).strip()
        return opening if opening and marker.opens_a_turn(opening) else ""

    def _changes(self, chat: Chat, text: str) -> list[Mark]:
        """Return what the template has made of messages besides writing them."""
        roles = tuple(" ".join((message.role, *message.others)) for message in chat)
        if roles not in self._probed:
            probes = (m._replace(content=probe(n)) for n, m in enumerate(chat))
            self._probed[roles] = self._or_none(chat_like(chat, probes))
        probed = self._probed[roles]
        if chat[-1].role != ASSISTANT:
            return changed(chat, text, probed)
        marks = changed(chat[:-1], text, probed)
        # without a message before it there is nothing to compare with, nor if a template wants more
        *before, last = chat
        opened = self._or_none(chat_like(chat, before)) if before else None
        return marks if opened is None else [*marks, *continued(opened, last.content, text)]

    def _dropped(self, chat: Chat, text: str, *, answer: bool = True) -> set[tuple[int, str]]:
        """Return the numbers and keys of messages without which the chat's text is the same."""
        shape = (answer, *((m.role, *m.others, bool(m.content)) for m in chat))
        if shape not in self._drops:
            self._drops[shape] = {
                (number, key)
                for number, key, less in without(chat)
                if self._or_none(less, answer=answer) == text
            }
        return self._drops[shape]

    def _or_none(self, chat: Chat, *, answer: bool = True) -> str | None:
        """Return the text of a chat, or None for one that the template does not take."""
        try:
            return _apply(self._tokenizer, chat, self._how, answer=answer)
        except Exception:  # noqa: BLE001  what it makes of the chats of rows counts
            return None


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
        raise ValueError(
            f"{how.key} is true but the tokenizer has no chat template; name a file of one: "
            f"{how.key}: FILE.jinja"
        )
    for name, source in sources(tokenizer).items():
        chance = chance_in(source)
        if chance is not None:
            raise ValueError(
                f"{how.key}: the tokenizer's chat template {name} must render a prompt "
                f"alike every time, but draws with {chance}; give a file of your own without it"
            )
    plain = Rendering(True, None, how.template_kwargs)
    one, other = (_render(tokenizer, plain.chat_of(text), how) for text in PROBES)
    if one == other:
        raise ValueError(
            f"{how.key}: the tokenizer's chat template renders every prompt alike: it "
            "leaves out the user's message"
        )
    if systems:
        check_system(tokenizer, how)


def check_system(tokenizer: PreTrainedTokenizerBase, how: Rendering) -> None:
    """Render system messages. ValueError: the template drops them, or takes no system prompt."""
    given = how.system_prompt is not None
    key = f"{how.section}.system_prompt" if given else how.key
    chats = [(ChatMessage(SYSTEM, text), ChatMessage(USER, PROBES[0])) for text in PROBES]
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
    words = {name for source in sources(tokenizer).values() for name in names_in(source)}
    return [name for name in kwargs if name not in words]


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, how: Rendering) -> str:
    try:
        return _apply(tokenizer, chat, how)
    except Exception as error:  # noqa: BLE001  a template is a program: it raises what it likes
        raise ValueError(f"{how.key}: the tokenizer's chat template fails: {said(error)}") from None


def _apply(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, how: Rendering, *, answer: bool = True
) -> str:
    """Return the text of a chat. answer: begin one, or continue the last message; else it ends."""
    return apply_template(tokenizer, chat, how.template_kwargs, how.clock, answer=answer)


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
