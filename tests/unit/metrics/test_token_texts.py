"""A response in the texts of its tokens: together they are the response, whatever the tokens."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from megatron_opd.metrics.token_texts import token_texts


def decode_bytes(ids: Sequence[int]) -> str:
    """A token a byte: every character above U+007F is spread over two to four."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=30))
@example("a\N{GRINNING FACE}\N{EURO SIGN}b")
def test_together_they_are_the_text(text: str):
    ids = list(text.encode("utf-8", errors="replace"))
    texts = token_texts(decode_bytes, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode_bytes(ids)


def test_the_token_that_completes_a_character_has_all_of_it():
    ids = list("x\N{EURO SIGN}y".encode())
    assert token_texts(decode_bytes, ids) == ["x", "", "", "\N{EURO SIGN}", "y"]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_do_not_wait_for_ever(ids: list[int]):
    asked: list[int] = []

    def counted(part: Sequence[int]) -> str:
        asked.append(len(part))
        return decode_bytes(part)

    texts = token_texts(counted, ids)
    assert len(texts) == len(ids)
    assert max(asked, default=0) <= 8  # what is decoded at once does not grow with the response
    waiting = 0
    for text in texts:
        waiting = 0 if text else waiting + 1
        assert waiting < 4


def test_a_space_that_a_tokenizer_drops_at_the_begin_is_kept_inside():
    words = {"\N{LOWER ONE EIGHTH BLOCK}a": 0, "\N{LOWER ONE EIGHTH BLOCK}b": 1, "c": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    whole = tokenizer.decode([0, 1, 2])
    assert token_texts(lambda ids: tokenizer.decode(list(ids)), [0, 1, 2]) == ["a", " b", "c"]
    assert whole == "a bc"
