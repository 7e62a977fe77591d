"""Templates that read a clock or draw lots; what a run keeps of its template."""

import json
from datetime import datetime
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from megatron_opd.data.render import Rendered, Rendering, render_prompts
from megatron_opd.data.template import RunTemplate, chance_in, read_template, reads_clock
from tests.support.framed import framed

CLOCK = (
    "{% if date is not defined %}{% set date = strftime_now('%d %b %Y %H:%M:%S') %}{% endif %}"
    "{{ date }}: {% for m in messages %}{{ m.content }}{% endfor %}"
)
THEN = datetime(2024, 2, 29, 23, 59, 58)


def texts(tokenizer: Any, how: Rendering) -> list[str]:
    found = render_prompts(["1+1=", "2+2="], tokenizer, how)
    return [tokenizer.decode(each.ids) for each in found if isinstance(each, Rendered)]


def test_every_prompt_of_a_run_is_given_one_moment(monkeypatch: pytest.MonkeyPatch):
    """Before: each was given the time of its rendering, another one after --resume."""
    tokenizer = framed(begin=False)
    tokenizer.chat_template = CLOCK
    found = texts(tokenizer, Rendering(True, clock=THEN))
    assert found == ["29 Feb 2024 23:59:58: 1+1=", "29 Feb 2024 23:59:58: 2+2="]
    # as transformers renders at that moment

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return THEN

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == found[0]
    own = Rendering(True, template_kwargs={"date": "today"}, clock=THEN)
    assert texts(tokenizer, own) == ["today: 1+1=", "today: 2+2="]


def test_a_clock_is_told_from_a_text_about_one():
    tokenizer = framed()
    tokenizer.chat_template = CLOCK
    assert reads_clock(tokenizer)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": CLOCK}
    assert reads_clock(tokenizer)
    tokenizer.chat_template = "strftime_now {# strftime_now #}{{ messages[0].content }}"
    assert not reads_clock(tokenizer)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ [1, 2] | random }}", "the filter random"),
        ("{{ [[1, 2]] | map('random') | list }}", "the filter random"),
        ("{{ lipsum() }}", "lipsum()"),
        ("{{ random }} lipsum {# lipsum #} {{ 'random' }}", None),
        ("{{ open", None),
    ],
)
def test_a_template_that_draws_lots_is_refused(template: str, found: str | None):
    assert chance_in(template) == found
    if found is not None:
        tokenizer = framed()
        tokenizer.chat_template = template + "{{ messages[0].content }}"
        with pytest.raises(ValueError, match=r"must render a prompt alike every time, but draws"):
            render_prompts(["1+1="], tokenizer, Rendering(True))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("source", [None, "a", {"default": "a", "tool_use": "b"}])
def test_what_a_run_keeps_comes_back(source: Any, own: bool):
    kept = RunTemplate(THEN, "/models/one", source, own, {"teachers.a": ("/models/two", source)})
    assert kept.exported == ("a" if own and source == "a" else None)
    assert RunTemplate.from_json(json.loads(json.dumps(kept.as_json()))) == kept


@pytest.mark.parametrize(
    "damage",
    [
        {"clock": "yesterday"},
        {"clock": None},
        {"clock": "2024-02-29T23:59:58+01:00"},
        {"source": 5},
        {"source": {"default": None, "x": 5}},
        {"origin": ["a"]},
        {"own": None},
        {"teachers": None},
        {"teachers": {"teacher": "a"}},
        {"teachers": {"teacher": ["/m", 5]}},
        {"teachers": {"teacher": ["/m", "a", "b"]}},
    ],
)
def test_what_a_run_kept_must_be_whole(damage: dict[str, Any]):
    with pytest.raises(ValueError, match="not a template and its clock"):
        RunTemplate.from_json(RunTemplate(THEN, "/m", "a").as_json() | damage)
    with pytest.raises(ValueError, match="not a template and its clock"):
        RunTemplate.from_json(5)


def test_a_file_that_is_no_template_is_one_line(tmp_path):
    path = tmp_path / "a.jinja"
    for content, words in (
        (b" \n", "must hold a Jinja template, it is blank"),
        (b"\xff{{ x }}", "is not UTF-8"),
        (b"a" * (2**20 + 1), "must have at most 1048576 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_template(path)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=r"data\.chat_template: cannot read"):
            read_template(missing)


def test_a_file_is_read_as_an_exported_one_is(tmp_path):
    tokenizer, file = framed(), tmp_path / "chat_template.jinja"
    tokenizer.save_pretrained(tmp_path)
    for content in ("{{ 'ä' }}\r\nb\rc\n", "a\n\n"):
        file.write_bytes(content.encode())
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert read_template(file) == loaded.chat_template
    file.write_bytes(b"\xef\xbb\xbfa")
    assert read_template(file) == "a"
