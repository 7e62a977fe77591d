"""The text of an answer, against the library's own decoding and the engine's rule for strings."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.end_tokens import Ending
from megatron_opd.data.response_text import ResponseText
from megatron_opd.inputs.tokenizers import make_decode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>")
PLAIN = ("<think>", "</think>")
"""Added tokens that are no special ones: they are part of the text."""


def build() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(PLAIN))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])


TOKENIZER: Any = build()
SPECIAL_IDS = {TOKENIZER.convert_tokens_to_ids(text): text for text in SPECIAL}
READER = ResponseText(make_decode(TOKENIZER), SPECIAL_IDS)
IDS = st.one_of(
    st.sampled_from([*SPECIAL_IDS, *TOKENIZER.encode("<think>7 =</think>")]),
    st.integers(0, len(TOKENIZER) - 1),
)


def test_what_the_generation_config_ends_at_is_no_text():
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    ids = [*TOKENIZER.encode("7"), end]
    assert READER.answer(ids, Ending((TOKENIZER.eos_token_id, end))) == "7"
    assert READER.answer(ids, Ending((TOKENIZER.eos_token_id,))) == "7", "it is special"


@given(st.lists(IDS, max_size=30), st.sets(st.sampled_from(list(SPECIAL_IDS))))
@settings(max_examples=500)
def test_without_strings_the_text_is_the_librarys_before_the_end(ids: list[int], ends: set[int]):
    cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    wanted = TOKENIZER.decode(ids[:cut], skip_special_tokens=True)
    assert READER.answer(ids, Ending(tuple(ends))) == wanted


STOPS = ("\n", "</think>", "<|im_start|>", "7", "= ", "<|im_end|>\n")


@given(
    st.lists(IDS, max_size=30),
    st.sets(st.sampled_from(list(SPECIAL_IDS))),
    st.sets(st.sampled_from(STOPS)).map(tuple),
)
@settings(max_examples=1000)
def test_no_special_token_and_no_stop_string_is_in_the_text(
    ids: list[int], ends: set[int], stops: tuple[str, ...]
):
    text = READER.answer(ids, Ending(tuple(ends), stops))
    ordinary = TOKENIZER.decode([i for i in ids if i not in SPECIAL_IDS])
    for special in SPECIAL:
        assert special not in text or special in ordinary, "unless ordinary tokens spell it"
    cut = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    shown = TOKENIZER.decode(ids[:cut])
    at = min((shown.index(stop) for stop in stops if stop in shown), default=None)
    if at is not None:
        plain = shown[:at]
        for special in SPECIAL:
            plain = plain.replace(special, "")
        assert text == plain


@pytest.mark.parametrize(
    ("spelled", "stops", "text"),
    [
        ("7\n8", ("\n",), "7"),
        ("7 END", ("END", " "), "7"),  # the earliest ends it
        ("7<|im_start|>user", ("<|im_start|>",), "7"),  # a string that a special token spells
        ("<|im_start|>7.", (".",), "7"),
        ("7", ("\n",), "7"),
    ],
)
def test_a_stop_string_is_not_part_of_the_answer(spelled: str, stops: Any, text: str):
    assert READER.answer(TOKENIZER.encode(spelled), Ending((), stops)) == text
