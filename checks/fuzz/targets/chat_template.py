"""A chat template, which is a program of whoever made the checkpoint."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import transformers  # noqa: F401  its import counts for no input

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, joined, one_of
from megatron_opd.data.render import PROBES, Rendered, Rendering, render_prompts
from megatron_opd.data.tokenizer import CHAT_TEMPLATE, build_tokenizer

CORPUS = [
    CHAT_TEMPLATE.encode(),
    b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n"
    b"{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    b"{{ raise_exception('no') }}",
    b"{{ messages[0]['content'].__class__.__mro__ }}",
    b"{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}",
    b"{% set ns = namespace(a=1) %}{{ ns.a / 0 }}{{ messages | tojson }}",
    b"{% for i in range(999) %}{{ messages[0].content }}{% endfor %}",
    b"{{ messages[0].content ~ strftime_now('%d') }}",
    b"{{ 1 / 0 }}{{ messages[5] }}{% include 'x' %}{% import 'os' as os %}",
]
tokenizer = cache(build_tokenizer)


def call(template: str) -> Any:
    """Render two prompts."""
    one = tokenizer()
    one.chat_template = template
    return render_prompts(list(PROBES), one, Rendering(chat_template=True))


def oracle(template: str, found: Any) -> str | None:
    """Two prompts are two token sequences."""
    one, other = (each.ids if isinstance(each, Rendered) else each for each in found)
    return "two prompts are rendered alike" if one == other else None


PARTS = (
    *(
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "messages",
        "[0]",
        ".content",
        " for ",
        " in ",
        "x",
        "|",
        "if ",
    ),
    *("{{ messages[0].content }}", "{% if x %}", "{% endif %}", "range(9)", "~", "(", ")", "'a'"),
)
BYTES = damaged_bytes(CORPUS, most=2)


def damaged(rng: Random) -> str:
    """A template, damaged."""
    return BYTES(rng).decode("utf-8", "replace")


def as_it_is(rng: Random) -> str:
    """A template of the corpus."""
    return rng.choice(CORPUS).decode()


TARGET = Target(
    "chat_template",
    one_of(damaged, damaged, damaged, as_it_is, joined(PARTS, 12)),
    call,
    (ValueError,),
    oracle,
)
