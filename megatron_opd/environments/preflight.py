"""Finds what a chat template rewrites when a conversation goes on.

Invariant: no rewrite means that what a template writes of a longer conversation begins with the ids
that the shorter one had, for the conversations that were tried: a row's, and two turns more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from megatron_opd.config.wording import shown
from megatron_opd.data.chats import ASSISTANT, TOOL, USER, Chat, ChatMessage, chat_like, tools_of
from megatron_opd.data.template import sources
from megatron_opd.environments.formats import CLOSE, OPEN
from megatron_opd.environments.turns import TurnEncoder

History = Literal["append", "branch"]
_THOUGHT = f"{OPEN}\nLet me see.\n{CLOSE}\n\n"


class Rewrite(NamedTuple):
    """Says where a template rewrites a conversation, with row and message counted from 1.

    position: index of the first id that differs. kept, written: the tokens that were sampled or
    given there, and that the template writes. dropped: tokens that it leaves out, of num_tokens.
    """

    row: int
    message: int
    role: str
    position: int
    kept: str
    written: str
    dropped: int
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"row {self.row}: the chat template rewrites message {self.message} ({self.role}) once "
            f"it is not the last: token {self.position} is {shown(self.written, 40)} instead of "
            f"{shown(self.kept, 40)}, and {self.dropped} of {self.num_tokens} tokens are left out"
        )


def rewrites(encoder: TurnEncoder, chats: Iterable[Chat]) -> Iterator[Rewrite]:
    """Yield the first rewrite of each row's conversation that has one.

    ValueError: the template does not take a row's conversation when it goes on.
    """
    for row, chat in enumerate(chats, start=1):
        found = _first_rewrite(encoder, row, chat)
        if found is not None:
            yield found


def note(found: Sequence[Rewrite], num_rows: int, history: History) -> str | None:
    """Return what is told at the start of a run: what the rewrites found mean, None without any."""
    if not found:
        return None
    kept, tokens = sum(each.dropped for each in found), sum(each.num_tokens for each in found)
    means = (
        f"append keeps {kept} of {tokens} tokens that it leaves out"
        if history == "append"
        else "branch makes each such history another sequence of its trajectory"
    )
    return (
        f"environment.history: the chat template rewrites {len(found)} of {num_rows} conversations "
        f"that were tried, and {means}; {found[0]}"
    )


def check_branch(encoder: TurnEncoder, chat: Chat) -> None:
    """Check that a history can be replayed in which turns are texts.

    ValueError: the chat template takes a tool's result behind a call of its own form alone.
    """
    result = _result(chat)
    if result is None:
        return
    answer = ChatMessage(ASSISTANT, "It is 7.")
    longer = chat_like(chat, (*chat, answer, result, answer, ChatMessage(USER, "Thank you.")))
    try:
        encoder.written(encoder.literal.marked(longer))
    except ValueError as error:
        raise ValueError(
            f"environment.history: branch gives the chat template turns as text, and {error}; "
            "use history: append"
        ) from None


def _first_rewrite(encoder: TurnEncoder, row: int, chat: Chat) -> Rewrite | None:
    kept = encoder.first(chat)
    ends = [(len(kept), len(chat))]  # how many ids belong to how many messages
    for answer, messages in _script(encoder, chat):
        ends[-1] = (_opening(encoder, chat), len(chat))
        sampled = _sampled(encoder, chat, answer)
        ends.append((len(kept) + len(sampled), len(chat) + 1))
        added = encoder.added(messages, sampled, chat)
        _check_written(encoder, messages, added)
        kept = [*kept, *sampled, *added]
        chat = chat_like(chat, (*chat, answer, *messages))
        ends.append((len(kept), len(chat)))
        written = encoder.first(chat)
        if written != kept:
            at = _alike(kept, written)
            message = next((n for end, n in ends if at < end), len(chat))
            return Rewrite(
                row,
                message,
                chat[message - 1].role,
                at,
                _token(encoder, kept, at),
                _token(encoder, written, at),
                max(len(kept) - len(written), 0),
                len(kept),
            )
    return None


def _script(
    encoder: TurnEncoder, chat: Chat
) -> Iterator[tuple[ChatMessage, tuple[ChatMessage, ...]]]:
    """Yield how a conversation may go on: an answer, and what follows it."""
    names = "".join(sources(encoder.tokenizer).values())
    thought = _THOUGHT if CLOSE in names else ""
    result = _result(chat)
    if result is not None:
        call = {"name": result.others["name"], "arguments": {"of": "seven"}}
        calls = [{"type": "function", "id": result.others["tool_call_id"], "function": call}]
        yield ChatMessage(ASSISTANT, thought, {"tool_calls": calls}), (result,)
    yield ChatMessage(ASSISTANT, f"{thought}It is 7."), (ChatMessage(USER, "And 1 more?"),)
    yield ChatMessage(ASSISTANT, f"{thought}It is 8."), (ChatMessage(USER, "Thank you."),)


def _check_written(
    encoder: TurnEncoder, messages: Sequence[ChatMessage], added: Sequence[int]
) -> None:
    tokenizer: Any = encoder.tokenizer
    text = tokenizer.decode(added, skip_special_tokens=False)
    for message in messages:
        if message.content not in text:
            raise ValueError(f"the chat template leaves out messages of the role {message.role}")


def _result(chat: Chat) -> ChatMessage | None:
    """Return a result of a conversation's first tool, if it has any."""
    for tool in tools_of(chat):
        name = str(tool.get("function", tool).get("name", "tool"))
        return ChatMessage(TOOL, "It is seven.", {"name": name, "tool_call_id": "call00001"})
    return None


def _sampled(encoder: TurnEncoder, chat: Chat, answer: ChatMessage) -> list[int]:
    """Return ids of an answer: those that the template writes where it is the last message."""
    chat = encoder.literal.marked(chat)
    opened = encoder.written(chat)
    closed = encoder.written(chat_like(chat, (*chat, answer)), answer=False)
    if closed.startswith(opened):
        text = closed.removeprefix(opened)
    else:
        begun = opened.rstrip().endswith(OPEN)
        text = answer.content.removeprefix(f"{OPEN}\n") if begun else answer.content
    ids = encoder.literal.ids(text)
    end = next((n for n, i in enumerate(ids) if i in encoder.end_ids), len(ids))
    return ids[: end + 1]


def _opening(encoder: TurnEncoder, chat: Chat) -> int:
    """Return where the generation prompt behind a conversation begins, which is the answer's."""
    opened = encoder.first(chat)
    try:
        closed = encoder.rendered(encoder.literal.marked(chat), answer=False)
    except Exception:  # noqa: BLE001  a template is a program: it raises what it likes
        return len(opened)
    return _alike(opened, encoder.literal.ids(closed))


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids two sequences have in common from their beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _token(encoder: TurnEncoder, ids: Sequence[int], at: int) -> str:
    tokenizer: Any = encoder.tokenizer
    return tokenizer.decode([ids[at]]) if at < len(ids) else ""
