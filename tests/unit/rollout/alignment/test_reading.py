"""What a teacher reads of a response: its own tokens, up to what it cannot read."""

import unicodedata

import pytest

from megatron_opd.rollout.alignment.reading import Reader, readable
from megatron_opd.rollout.alignment.token_bytes import TokenBytes

E = "é".encode()
OURS = (b"a", E[:1], E[1:], b"ab", None, None)
END, SPECIAL = 4, 5
THEIRS = (b"a", b"b", E, None, b"e", b"\xcc", b"\x81")


def reader(encode=None) -> Reader:
    table = {"a": [0], "b": [1], "é": [2], "e": [4], "́": [5, 6]}
    plain = lambda text: [i for c in text for i in table[c]]  # noqa: E731
    return Reader(
        TokenBytes(OURS, END, (True,) * len(OURS)),
        TokenBytes(THEIRS, 3, (True,) * len(THEIRS)),
        encode or plain,
    )


@pytest.mark.parametrize(
    ("response", "ids", "rows", "chunks"),
    [
        ([0, 3, END], [0, 0, 1, 3], [0, 1, 3], [0, 1, 2]),
        ([END], [3], [0], [0]),
        # a character of two tokens is one of the teacher's
        ([0, 1, 2, END], [0, 2, 3], [0, 1, -1, 2], [0, 1, 1, 2]),
        # cut in a character: the teacher reads up to it
        ([0, 0, 1], [0, 0], [0, 1, -1], [0, 1, -1]),
        ([1], [], [-1], [-1]),
        # bytes that are no character, in the middle: what follows is not read, nor the end
        ([0, 2, 0, END], [0], [0, -1, -1, -1], [0, -1, -1, -1]),
        # a special token that is no end, and an id beyond the tokenizer's
        ([0, SPECIAL, 0], [0], [0, -1, -1], [0, -1, -1]),
        ([0, 99], [0], [0, -1], [0, -1]),
    ],
)
def test_what_is_read(response, ids, rows, chunks) -> None:
    found = reader().read(response)
    assert found.ids_R.tolist() == ids
    assert found.spans.row_T.tolist() == rows
    assert found.spans.chunk_T.tolist() == chunks
    assert len(found.spans.chunk_R) == len(ids)


def test_a_normaliser_that_changes_the_text_reads_nothing() -> None:
    def normalised(text: str) -> list[int]:
        return [
            i
            for c in unicodedata.normalize("NFD", text)
            for i in {"a": [0], "e": [4]}.get(c, [5, 6])
        ]

    assert reader(normalised).read([0, 0]).ids_R.tolist() == [0, 0]  # it changes nothing of this
    assert reader(normalised).read([0, 1, 2, END]).ids_R.tolist() == []


def test_readable_is_the_longest_utf8() -> None:
    assert readable(b"x" + E + E[:1]) == "xé"
    assert readable(E[1:]) == ""
