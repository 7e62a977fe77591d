"""Encodes a whole history as the chat template writes it now, with the ids that were sampled.

Invariant: a turn that the template still writes as it was sampled has its sampled ids; only what it
has rewritten is encoded anew, and is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage, chat_like
from megatron_opd.data.literal import SPOKEN
from megatron_opd.environments.turns import TurnEncoder


def turn_text(encoder: TurnEncoder, ids: Sequence[int]) -> str:
    """Return what a turn says, its control tokens as text, without the end token."""
    tokenizer: Any = encoder.tokenizer
    return tokenizer.decode(_said(encoder, ids), skip_special_tokens=False)


def replayed(encoder: TurnEncoder, chat: Chat, turns: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids of a conversation that goes on, with the generation prompt.

    turns: the sampled ids of the last assistant's messages of `chat`, in order; their contents are
    `turn_text` of them. One without ids was not sampled. ValueError: as TurnEncoder.first.
    """
    marked = encoder.literal.marked(chat)
    text = encoder.written(marked)
    spoken = encoder.written(chat_like(marked, _spoken(marked, turns)))
    turns = [turn for turn in turns if turn]
    parts = spoken.split(SPOKEN)
    if "".join(parts) != text or len(parts) != len(turns) + 1:
        return encoder.literal.ids(text)
    ids: list[int] = []
    last: Sequence[int] = ()
    for number, part in enumerate(parts):
        turn = turns[number] if number < len(turns) else ()
        said = turn_text(encoder, turn)
        kept = bool(turn) and part.endswith(said)
        ids += _after(encoder, encoder.literal.ids(part.removesuffix(said) if kept else part), last)
        ids += _said(encoder, turn) if kept else ()
        last = turn if kept else ()
    return ids


def _said(encoder: TurnEncoder, ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in encoder.end_ids else ids


def _after(encoder: TurnEncoder, ids: list[int], turn: Sequence[int]) -> list[int]:
    """Return what follows a turn, with the end token that was sampled for the template's."""
    if turn and turn[-1] in encoder.end_ids and encoder.closes(ids):
        return [turn[-1], *ids[1:]]
    return ids


def _spoken(chat: Chat, turns: Sequence[Sequence[int]]) -> list[ChatMessage]:
    """Return messages in which the ends of the assistant's that were sampled can be found."""
    answers = [n for n, message in enumerate(chat) if message.role == ASSISTANT]
    last = answers[len(answers) - len(turns) :]
    marked = {n for n, turn in zip(last, turns, strict=True) if turn}
    return [
        m._replace(content=m.content + SPOKEN) if n in marked else m for n, m in enumerate(chat)
    ]
