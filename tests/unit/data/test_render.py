"""Tokenizers and templates that do not come to an end."""

import threading

import pytest
from tokenizers import Regex, pre_tokenizers

from megatron_opd.data import render
from megatron_opd.data.render import Unfinished, render_prompts, within
from megatron_opd.data.tokenizer import build_tokenizer

LONG = "{% for i in range(9000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Before: waited for, without an end."""
    monkeypatch.setattr(render, "LEAST_S", 0.05, raising=False)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = LONG + "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"^student.model: its tokenizer's chat template") as found:
        render_prompts(["1+1=", "2+2="], tokenizer, chat_template=True)
    for words in ("2 prompts of 8 characters", "within 0 s", "endless loop"):
        assert words in str(found.value)


def test_a_regular_expression_that_explodes_is_ended_by_the_library():
    """Its engine counts retries and gives up; the panic is one line here."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(1|1?)+$"), "isolated")
    with pytest.raises(ValueError, match=r"cannot encode the prompts.*retry-limit") as found:
        render_prompts(["1" * 40 + "2"], tokenizer, chat_template=False)
    assert "\n" not in str(found.value)


def test_what_ends_in_time_is_returned_and_raised():
    def fails() -> None:
        raise TimeoutError("its own")

    assert within(30, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        within(30, fails)


def test_what_does_not_end_keeps_no_process_alive():
    ended, earlier = threading.Event(), set(threading.enumerate())
    with pytest.raises(Unfinished):
        within(0.01, lambda: ended.wait(30))
    (left,) = set(threading.enumerate()) - earlier
    assert left.daemon
    ended.set()
    left.join(30)
