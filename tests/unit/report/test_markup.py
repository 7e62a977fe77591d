"""Text of runs is hostile: nothing of it may act."""

import base64
import hashlib
import json
from html.parser import HTMLParser

import pytest

from megatron_opd.report.markup import (
    escaped,
    folded,
    json_for_script,
    policy,
    source_hash,
    table,
    visible,
)

HOSTILE = "</script><script>alert(1)</script>\u202eevil\x1b[31m\u2028 'a' \"b\" &amp; <!--"


class Parts(HTMLParser):
    """The tags of a piece of HTML, and its text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_hostile_text_stays_text():
    found = Parts(f"<p title='{escaped(HOSTILE)}'>{escaped(HOSTILE)}</p>")
    assert found.tags == ["p"]
    assert found.text == visible(HOSTILE)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb", "a\\u202eb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\tb\nc", "a\tb\nc"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("nul \0", "nul \\x00"),
        ("Grüße, 你好", "Grüße, 你好"),
    ],
)
def test_characters_that_nobody_sees_are_written_out(text, shown):
    assert visible(text) == shown


def test_json_cannot_leave_its_script():
    written = json_for_script({"name": HOSTILE, "n": 1.5, "none": None})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"name": HOSTILE, "n": 1.5, "none": None}


def test_json_holds_no_number_that_browsers_cannot_read():
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_script({"loss": float("nan")})


def test_the_policy_names_hashes_and_allows_nothing_else():
    found = policy(["let a = 1;"], ["p {}", "b {}"])
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert f"script-src 'sha256-{digest}';" in found
    assert f"style-src {source_hash('p {}')} {source_hash('b {}')};" in found
    assert found.startswith("default-src 'none';")
    assert "unsafe" not in found


def test_keys_may_be_broken_between_words_and_nowhere_else():
    found = table(("key", ""), [("learner.max_tokens", "1"), (f"a.{HOSTILE}", "2")], "keys")
    assert "learner.<wbr>max_<wbr>tokens" in found
    assert set(Parts(found).tags) == {"div", "table", "thead", "tbody", "tr", "th", "td", "wbr"}


def test_tables_and_folds_escape_what_they_hold():
    markup = table(("<i>", "b"), [("<u>", HOSTILE)], "numbers") + folded(HOSTILE, "<em>x</em>")
    tags = Parts(markup).tags
    assert not {"i", "u", "script"} & set(tags)
    assert tags[-3:] == ["details", "summary", "em"]
