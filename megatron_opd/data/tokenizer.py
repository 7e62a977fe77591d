"""Builds the character tokenizer of the built-in tasks: one token per ASCII character, 128 ids.

Invariant: text made of printable ASCII and newlines survives encode and decode unchanged, and the
concatenation of two texts encodes to the concatenation of their encodings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_opd.data.without_torch import transformers_for_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"
VOCAB_SIZE = 128

# The built-in models read a prompt as it stands: a user turn is its text, an assistant turn ends
# with the end token. With this template `data.chat_template` changes nothing for them.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: <pad>, <eos>, <unk>, newline, printable ASCII, and unused fillers."""
    from tokenizers import Tokenizer, decoders, models

    PreTrainedTokenizerFast = transformers_for_tokenizers().PreTrainedTokenizerFast

    words = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, "\n", *(chr(code) for code in range(32, 127))]
    words += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(words))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK_TOKEN))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
