"""Files of prompts with messages, and a tokenizer with a chat template that shows their roles."""

import json

from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.tokenizer import build_tokenizer

CHATTY = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chatty():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATTY
    return tokenizer


def turn(role, content):
    return {"role": role, "content": content}


def load_rows(tmp_path, rows, rules):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(path, chatty(), rules)
