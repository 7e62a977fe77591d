"""Encodes what a template writes, so that no message becomes a control token.

Invariant: control tokens come from the template and from what the model says alone. The rest of a
text is encoded as the tokenizer encodes it, also across the border of a template's text and a
message's.

A message's text is marked before it is rendered: a character that no text may hold is put into
everything that looks like a control token. In what the template then writes, the unmarked control
tokens are the template's own; a copy of the tokenizer knows them by other names, and none by the
names that a text may spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_opd.config.wording import shown
from megatron_opd.data.chats import ASSISTANT, Chat, ChatMessage, chat_like
from megatron_opd.data.template import sources

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Noncharacters: Unicode reserves them for a program's own use, and no text has them.
MARK, NAME, SPOKEN = "\ufdd0", "\ufdd1", "\ufdd2"
_FIRST = 0xE000
NOT_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdd2]")
REPLACEMENT = "\ufffd"


class LiteralEncoder:
    """Encodes rendered chats with one tokenizer.

    control: control tokens by their text: special tokens, and added ones that its chat template
    writes or reads, such as <tool_call>. ValueError: the tokenizer has no fast form to copy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        written = "".join(sources(tokenizer).values())
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self.control: Mapping[str, int] = {
            token.content: i
            for i, token in added.items()
            if len(token.content) > 1 and (token.special or token.content in written)
        }
        longest = sorted(self.control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._names = {text: NAME + chr(_FIRST + n) for n, text in enumerate(longest)}
        self._copy, self._ids = self._renamed()

    def marked(self, chat: Chat) -> Chat:
        """Return a chat whose messages hold neither control tokens nor what is no text.

        But for an assistant's: what a model says holds its control tokens.
        """
        return chat_like(chat, (m if m.role == ASSISTANT else self._marked(m) for m in chat))

    def ids(self, rendered: str) -> list[int]:
        """Return the ids of what a template has written of marked messages.

        ValueError: the tokenizer has no way to write a text that looks like a control token.
        """
        if MARK not in rendered:
            return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
        named = self._pattern.sub(lambda match: self._names[match[0]], rendered)
        ids = self._copy.encode(named.replace(MARK, ""), add_special_tokens=False).ids
        for text, i in self.control.items():
            if i in ids and i not in self._ids:
                raise ValueError(
                    f"the tokenizer has no ids for the text {shown(text)} but its token"
                )
        return [self._ids.get(i, i) for i in ids]

    def _marked(self, message: ChatMessage) -> ChatMessage:
        return ChatMessage(message.role, self._mark(message.content), self._mark(message.others))

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            text = NOT_TEXT.sub(REPLACEMENT, value)
            while match := self._pattern.search(text):
                text = text[: match.start() + 1] + MARK + text[match.start() + 1 :]
            return text
        if isinstance(value, Mapping):
            return {name: self._mark(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list | tuple):
            return [self._mark(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def _renamed(self) -> tuple[Tokenizer, Mapping[int, int]]:
        """Return a copy whose control tokens have other names, and the ids of its added tokens."""
        from tokenizers import Tokenizer

        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            kind = type(self._tokenizer).__name__
            raise ValueError(
                f"student.model: its tokenizer must be a fast one, got {kind}; convert it to a "
                "tokenizer.json"
            )
        tree = json.loads(fast.to_str())
        tree["post_processor"] = None
        ids: dict[str, int] = {}
        for each in tree["added_tokens"]:
            each["content"] = self._names.get(each["content"], each["content"])
            ids[each["content"]] = each["id"]
        copy = Tokenizer.from_str(json.dumps(tree))
        vocabulary = copy.get_vocab()
        return copy, {vocabulary[name]: i for name, i in ids.items()}
