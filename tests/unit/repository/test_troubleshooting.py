"""docs/troubleshooting.md names columns and keys that exist, and something to do in each line."""

import re

from megatron_opd.metrics.catalogue import METRICS
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
OF_THE_SUMMARY = {"keys_refused", "samples_dropped", "servers_lost", "teacher_accuracy_pct"}
WORDS = {
    "too_late",
    "too_stale",
    "clip_grad",
    "max_ratio",
    "forward_kl",
    "token_mean",
    "no_answer",
}  # values, short keys
ROW = re.compile(r"^\| (.+?) \| (.+?) \|(?: (.*?) \|)?$", re.MULTILINE)


def test_every_symptom_that_users_name_has_a_section():
    titles = [section.partition("\n")[0].lower() for section in SECTIONS]
    for words in (
        *("loss is flat", "divergence", "grow", "drift apart", "learner is idle"),
        *("servers are idle", "rewards are equal", "teacher makes no sense"),
        *("weight syncs are slow", "run ended"),
    ):
        assert sum(words in title for title in titles) == 1, words
        assert words in TEXT.partition("\n## ")[0].lower(), f"{words}: not in the list at the top"


def test_every_key_is_one_of_the_configuration():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", page))
    sections = {key.partition(".")[0] for key in keys}
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[`:]", TEXT))
    named = {key for key in named if key.partition(".")[0] in sections}
    named -= {"learner.log", "metrics.jsonl"}  # files
    assert len(named) > 40
    assert named - keys == set()


def test_every_column_is_one_of_the_catalogue():
    named = {word for word in re.findall(r"`([a-z0-9_]+)`", TEXT) if "_" in word}
    assert len(named & set(METRICS)) > 40
    assert named - set(METRICS) - OF_THE_SUMMARY - WORDS == set()


def test_every_line_says_where_to_look_and_what_to_do():
    lines = [line for line in ROW.findall(TEXT) if not set(line[0]) <= set("-|")]
    lines = [line for line in lines if line[0] not in {"look at", "`status` and `cause` of"}]
    assert len(lines) > 60
    for look, says, _ in lines:
        assert says or look == "none of these", look
