"""What peers wrote is shown as text: it moves no cursor, paints nothing and stays on one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge.errors import ServerRefused, one_line, printable, some


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain  text\n on lines\t", "plain text on lines"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31mred", "\\x9b31mred"),  # the eight-bit introducer
        ("user\u202etxt.exe", "user\\u202etxt.exe"),  # shown right to left by a terminal
        ("a\u200bb\u2066c", "a\\u200bb\\u2066c"),
        ("a\x00b\x7fc\rd", "a\\x00b\\x7fc d"),
        ("half \ud83d pair", "half \\ud83d pair"),  # cannot be encoded
        ("Grüße, 你好 😀", "Grüße, 你好 😀"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str):
    assert one_line(text) == shown


@given(st.text(alphabet=st.characters(), max_size=60))
def test_every_line_can_be_printed_anywhere(text: str):
    line = one_line(text, limit=30)
    assert line.isprintable()
    assert len(line) <= 30
    line.encode("utf-8")
    assert printable(text).isprintable()


def test_a_megabyte_is_cut_before_it_is_looked_at():
    assert one_line("x" * 10**7) == "x" * 397 + "..."


def test_a_servers_explanation_is_safe_to_print():
    error = ServerRefused("http://host:1", "/generate", 400, "no\x1b[31m\nway")
    assert str(error) == "http://host:1/generate: HTTP 400: no\\x1b[31m way"


def test_names_of_a_checkpoint_stay_on_one_line():
    """Whoever wrote the checkpoint chose them."""
    assert some(["b"]) == "1 tensor: b"
    assert some(iter("dcab")) == "4 tensors: a, b, c, ..."
    assert some(["a\n\x1b[2Jb"]) == "1 tensor: a \\x1b[2Jb"
    assert len(some(["x" * 10_000])) < 500
