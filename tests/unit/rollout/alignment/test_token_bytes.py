"""The bytes of real tokenizers' tokens, joined, are the text that they read."""

import json
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)

from megatron_opd.rollout.alignment.token_bytes import (
    NO_TWIN,
    TokenBytes,
    mid_text,
    read_token_bytes,
    twins,
)
from tests.support.two_tokenizers import byte_level, with_fallback

TEXTS = ("the cat", " sat\n\n 12", "café ☕ 𐍈 日本", "", "  two", "\t\x00z")


def metaspace() -> Any:
    words = [("<unk>", 0.0), *((c, -3.0) for c in "▁thecasonm12+"), ("▁the", -1.0)]
    made: Any = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace()
    return made


def tree_of(made: Any) -> dict[str, Any]:
    return json.loads(made.to_str())


def spelt(made: Any, text: str) -> bytes:
    """What the tokenizer's own cut of a text spells, in the middle of another."""
    tree = tree_of(made)
    found = read_token_bytes(tree, None).of_V
    cut: Any = Tokenizer.from_str(json.dumps(mid_text(tree)))
    return b"".join(found[i] or b"?" for i in cut.encode(text).ids)


@pytest.mark.parametrize("made", [byte_level(300), byte_level(280), with_fallback()])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_the_text(made: Any, text: str) -> None:
    assert spelt(made, text) == text.encode()


@pytest.mark.parametrize("made", [byte_level(300), with_fallback()])
def test_a_prefix_that_is_left_on_is_seen(made: Any) -> None:
    found = read_token_bytes(tree_of(made), None).of_V
    assert b"".join(found[i] or b"?" for i in made.encode("cat").ids) == b" cat"


def test_metaspace_is_a_blank() -> None:
    assert spelt(metaspace(), "cat the") == b"cat the"


def test_special_tokens_spell_nothing_and_added_ones_themselves() -> None:
    made = byte_level(280)
    made.add_tokens([AddedToken("Ġ<think>", special=False, normalized=False)])
    found = read_token_bytes(tree_of(made), 0)
    assert found.of_V[made.token_to_id("<end>")] is None
    assert found.of_V[made.token_to_id("Ġ<think>")] == "Ġ<think>".encode()


def test_half_characters_have_twins() -> None:
    """A token that is a byte of a character has the other tokenizer's byte as twin."""
    ours, theirs = byte_level(300), with_fallback()
    a, b = (read_token_bytes(tree_of(made), None) for made in (ours, theirs))
    twin_V = twins(a, b)
    byte = a.by_bytes()[b"\xc3"]
    assert theirs.id_to_token(int(twin_V[byte])) == "<0xC3>"


def test_bytes_that_a_piece_spells_are_the_pieces_twin() -> None:
    """<0x74> spells "t" too, but no text is cut into it: it is nobody's twin and has none."""
    theirs = read_token_bytes(tree_of(with_fallback()), None)
    fallback = with_fallback().token_to_id("<0x74>")
    assert theirs.of_V[fallback] == b"t"
    ours = TokenBytes((b"t", b"zz"), None, (True, True))
    assert twins(ours, theirs).tolist() == [with_fallback().token_to_id("t"), NO_TWIN]
    assert twins(theirs, ours)[fallback] == NO_TWIN


def test_ends_are_twins_and_no_id_is_the_twin_of_two() -> None:
    ours = TokenBytes((b"x", None, b"x", None), 3, (True,) * 4)
    theirs = TokenBytes((None, b"x"), 0, (True,) * 2)
    assert twins(ours, theirs).tolist() == [1, NO_TWIN, NO_TWIN, 0]


def test_word_pieces_are_refused() -> None:
    made: Any = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}))
    with pytest.raises(ValueError, match="must be of type BPE or Unigram, got WordPiece"):
        read_token_bytes(tree_of(made), None)
