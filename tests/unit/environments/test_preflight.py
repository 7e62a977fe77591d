"""A template that rewrites history is found, with its first token and message."""

import pytest

from megatron_opd.data.chats import USER, ChatMessage, RowChat
from megatron_opd.environments.preflight import Rewrite, check_branch, note, rewrites
from tests.support.chat_families import ADD, BY_NAME, FAMILIES

ROWS = [(ChatMessage(USER, "How much is 2 + 3?"),), (ChatMessage(USER, "And 3 + 4?"),)]


def found(name: str, tools=()) -> list[Rewrite]:
    return list(rewrites(BY_NAME[name].encoder(), [RowChat.of(row, tools) for row in ROWS]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.tools], ids=lambda f: f.name)
def test_every_family_is_found_to_do_what_it_does(family):
    each = found(family.name, (ADD,))
    assert [rewrite.row for rewrite in each] == ([1, 2] if family.rewrites else [])
    assert {rewrite.role for rewrite in each} <= {family.rewrites}


def test_the_first_token_that_qwen3_rewrites_is_named():
    family = BY_NAME["qwen3"]
    first = found("qwen3")[0]
    assert (first.row, first.message, first.role) == (1, 2, "assistant")
    assert (first.kept, first.written) == ("<think>", "I")
    prompt = family.encoder().first(ROWS[0])
    assert first.position == len(prompt)  # where the answer began
    # the thought, and the two line breaks behind it
    assert first.dropped == len(family.ids("<think>\nLet me see.\n</think>\n\n"))
    assert str(first) == (
        "row 1: the chat template rewrites message 2 (assistant) once it is not the last: token "
        f"{len(prompt)} is 'I' instead of '<think>', and {first.dropped} of {first.num_tokens} "
        "tokens are left out"
    )


def test_a_generation_prompt_that_is_taken_back_belongs_to_the_answer():
    """DeepSeek-R1 begins an answer with <think>, of which nothing is left in the history."""
    first = found("deepseek-r1")[0]
    assert (first.message, first.role) == (2, "assistant")
    assert first.kept == "<think>"


def test_tools_that_move_to_the_last_user_are_found_in_the_first_message():
    first = found("mistral", (ADD,))[0]
    assert (first.message, first.role, first.kept) == (1, "user", "[AVAILABLE_TOOLS]")
    assert found("mistral") == []


def test_a_template_that_leaves_results_out_is_told():
    with pytest.raises(ValueError, match="leaves out messages of the role tool"):
        found("phi3", (ADD,))
    assert found("phi3") == []


def test_a_template_that_takes_no_longer_conversation_is_told():
    family = BY_NAME["qwen2.5"]
    tokenizer, kept = family.tokenizer(), family.tokenizer().chat_template
    refuses = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    tokenizer.chat_template = refuses + kept
    try:
        with pytest.raises(ValueError, match="does not take the messages: TemplateError: one"):
            found("qwen2.5")
    finally:
        tokenizer.chat_template = kept


def test_what_is_told_at_the_start():
    each = found("qwen3")
    tokens, dropped = sum(r.num_tokens for r in each), sum(r.dropped for r in each)
    head = (
        "environment.history: the chat template rewrites 2 of 2 conversations that were tried, and "
    )
    assert note(each, 2, "append") == (
        f"{head}append keeps {dropped} of {tokens} tokens that it leaves out; {each[0]}"
    )
    assert note(each, 2, "branch") == (
        f"{head}branch makes each such history another sequence of its trajectory; {each[0]}"
    )
    assert dropped > 0
    assert note([], 2, "append") is None


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.tools], ids=lambda f: f.name)
def test_a_template_that_wants_calls_before_results_cannot_branch(family):
    encoder = family.encoder()
    check_branch(encoder, RowChat.of(ROWS[0], ()))
    chat = RowChat.of(ROWS[0], (ADD,))
    if family.name not in ("gpt-oss", "mistral"):
        check_branch(encoder, chat)
        return
    with pytest.raises(ValueError, match=r"gives the chat template turns as text, .*TemplateError"):
        check_branch(encoder, chat)
