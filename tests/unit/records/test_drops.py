"""A reason to drop a sample is declared once, with what it means and what to do."""

import re

import pytest

from megatron_opd.records.drops import DROPS
from tests.support.paths import ROOT

SOURCES = sorted(ROOT.glob("megatron_opd/**/*.py"))
LITERAL = re.compile(r"(?:Rejected|VerifierFailed|TooOld)\(\s*f?[\"']")


def test_every_reason_has_a_meaning_and_a_remedy():
    assert len(DROPS) > 20
    for word, drop in DROPS.items():
        assert word.isidentifier()
        assert word == drop.word
        assert drop.meaning
        assert drop.remedy


def test_a_reason_is_declared_in_one_place():
    """Whoever drops a sample takes the word from records/drops.py."""
    assert [str(path) for path in SOURCES if LITERAL.search(path.read_text())] == []


@pytest.mark.parametrize("text", ['RolloutRejected("aborted")', "ScoreRejected(\n    f'no_{x}'"])
def test_a_word_of_its_own_is_found(text: str):
    assert LITERAL.search(text)
