"""The format of a model's calls is the one in which its chat template writes them."""

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.render import Rendering
from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.calls import CallReader
from megatron_opd.environments.formats import FORMATS
from megatron_opd.environments.turns import TurnEncoder
from tests.support.chat_families import ADD, BY_NAME, FAMILIES

KNOWN = [family for family in FAMILIES if family.format is not None]
UNKNOWN = [family for family in FAMILIES if family.format is None]


@pytest.mark.parametrize("family", KNOWN, ids=lambda family: family.name)
def test_it_is_found(family):
    assert call_format(family.encoder()) is FORMATS[family.format].template


@pytest.mark.parametrize("family", UNKNOWN, ids=lambda family: family.name)
def test_a_template_that_writes_no_calls_needs_a_name(family):
    with pytest.raises(ValueError, match=r"no known format: name one in environment.tool_format"):
        call_format(family.encoder())
    assert call_format(family.encoder(), "hermes") is FORMATS["hermes"].template


def test_a_checkpoints_own_response_template_is_used_where_no_format_fits():
    family = BY_NAME["deepseek-r1"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=family.tokenizer().backend_tokenizer)
    tokenizer.chat_template = family.tokenizer().chat_template
    call = {"name": "{name}", "arguments": "{content}"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\[(?P<name>\w+)",
                "close": "]",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": call},
            },
            "content": {},
        },
    }
    template = call_format(TurnEncoder(tokenizer, Rendering(chat_template=True), ()))
    reply = CallReader(template, [ADD]).read('<think>a</think>b[add{"a": 1, "b": 2}]', 0)
    (made,) = reply.calls
    assert (reply.thought, reply.text, made.arguments) == ("a", "b", {"a": 1, "b": 2})


def test_there_are_families_of_both_kinds():
    assert len(KNOWN) >= 6
    assert UNKNOWN
