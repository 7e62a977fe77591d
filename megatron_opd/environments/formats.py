"""Declares how families of models write tool calls, for the response parser of transformers.

A format is a response template of transformers: regions of a text between delimiters. `thought` is
what a model thinks before it answers, `calls` are its tool calls, `text` is all else. Calls stay
text where a family writes JSON, so that one that is none is seen as a call, and only it is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Template = Mapping[str, Any]
THOUGHT, CALLS, TEXT = "thought", "calls", "text"
OPEN, CLOSE = "<think>", "</think>"
_UNNAMED: Template = {"function": {"name": None, "arguments": "{content}"}}
_NAMED: Template = {"function": {"name": "{name}", "arguments": "{content}"}}
_THINKING: Template = {"open": OPEN, "close_pattern": r"</think>\s*", "content": "text"}


def _template(calls: Template, **fields: Template) -> Template:
    """Return a response template. Its anchor is never looked for: a parser is given an answer."""
    calls = {"repeats": True, "content": "text", **calls}
    return {
        "start_anchor_pattern": r"(?!)",
        "fields": {THOUGHT: _THINKING, CALLS: calls, TEXT: {"content": "text"}, **fields},
    }


def _tags(pattern: str) -> Template:
    """Return the content of a call whose arguments are tags; the tool's schema gives them types."""
    return {
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern, "value_parser": {"name": "text"}},
        "transform": _NAMED,
    }


PLAIN: Template = {
    "start_anchor_pattern": r"(?!)",
    "fields": {THOUGHT: _THINKING, TEXT: {"content": "text"}},
}
"""Template of turns without tools."""


def _deepseek(name: str) -> str:
    """Return a control token of DeepSeek's: its bars are full-width."""
    return f"<\uff5c{name}\uff5c>"


_SEPARATOR = _deepseek("tool▁sep")
_DEEPSEEK = f"(?:{_deepseek('tool▁calls▁begin')})?{_deepseek('tool▁call▁begin')}"
_DEEPSEEK_END = f"{_deepseek('tool▁call▁end')}(?:{_deepseek('tool▁calls▁end')})?\\s*"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Describes one format. families: whose it is, for people."""

    families: str
    template: Template


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        "Hermes, Qwen2.5, Qwen3",
        _template(
            {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "transform": _UNNAMED}
        ),
    ),
    "qwen3_coder": CallFormat(
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        _template(
            {
                "open_pattern": r"<tool_call>\s*(?:<function=)?(?P<name>[^>\n<]*)>?",
                "close_pattern": r"</tool_call>\s*",
                **_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
            }
        ),
    ),
    "llama3": CallFormat(
        "Llama 3.1, 3.2 and 3.3",
        _template(
            {
                "open_pattern": r"^\s*(?:<\|python_tag\|>)?(?=\{\s*\"name\")",
                "transform": _UNNAMED,
            }
        ),
    ),
    "glm": CallFormat(
        "GLM-4.5, GLM-4.6",
        _template(
            {
                "open_pattern": r"<tool_call>\s*(?P<name>[^\n<]*)",
                "close_pattern": r"</tool_call>\s*",
                **_tags(
                    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                ),
            }
        ),
    ),
    "deepseek_v3": CallFormat(
        "DeepSeek-V3, DeepSeek-R1",
        _template(
            {
                "open_pattern": (
                    rf"{_DEEPSEEK}(?:function)?(?:{_SEPARATOR})?(?P<name>[^\n<`]*)\n?(?:```json)?"
                ),
                "close_pattern": r"(?:\n?```)?" + _DEEPSEEK_END,
                "transform": _NAMED,
            }
        ),
    ),
    "deepseek_v31": CallFormat(
        "DeepSeek-V3.1",
        _template(
            {
                "open_pattern": rf"{_DEEPSEEK}(?P<name>[^\n<]*)(?:{_SEPARATOR})?",
                "close_pattern": _DEEPSEEK_END,
                "transform": _NAMED,
            }
        ),
    ),
    "mistral": CallFormat(
        "Mistral 7B v0.3, Nemo, Small",
        _template({"open": "[TOOL_CALLS]", "transform": _UNNAMED}),
    ),
    "gpt_oss": CallFormat(
        "gpt-oss",
        _template(
            {
                "open_pattern": (
                    r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\."
                    r"(?P<name>[^\s<]*)[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>"
                ),
                "close_pattern": r"<\|call\|>",
                "transform": _NAMED,
            },
            thought={
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
                "content": "text",
            },
            text={
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"<\|(?:return|end)\|>",
                "content": "text",
            },
        ),
    ),
}
"""Formats by their names."""
