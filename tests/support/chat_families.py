"""Small tokenizers with the control tokens and the chat template of model families.

Vocabulary: bytes and a few merges, so that one text has many tokenizations; the control tokens of a
family are special or merely added as in its own tokenizer.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.render import Rendering
from megatron_opd.environments.turns import TurnEncoder

TEMPLATES = Path(__file__).with_name("chat_templates")
_CORPUS = [
    "the tool says that the answer is thirteen, and then the user asks for another one",
    "error: there is no such tool; the call must be JSON with a name and arguments",
    '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 13}}\n</tool_call>',
]


@dataclass(frozen=True)
class ChatFamily:
    """A family: its template, its control tokens, and what its template does.

    ends: what ends a turn. tools: its template writes tool calls and their results. format: in
    which it writes them. rewrites: the role whose messages it rewrites as a conversation with tools
    goes on, None for none.
    """

    name: str
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None
    tools: bool = True
    format: str | None = None
    rewrites: str | None = None

    @cache  # noqa: B019  families are module constants
    def tokenizer(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(_bytes())
        special = dict.fromkeys((*self.special, *self.ends))
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in self.added])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=self.ends[0], bos_token=self.bos
        )
        fast.chat_template = (TEMPLATES / self.template).read_text(encoding="utf-8")
        return fast

    def ids(self, text: str) -> list[int]:
        return self.tokenizer()(text, add_special_tokens=False)["input_ids"]

    def encoder(self) -> TurnEncoder:
        tokenizer = self.tokenizer()
        ends = tokenizer.convert_tokens_to_ids(list(self.ends))
        return TurnEncoder(tokenizer, Rendering(chat_template=True), ends)


@cache
def _bytes() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def _deepseek(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5c{name}\uff5c>" for name in names)


_DEEPSEEK = _deepseek("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
_OF_CALLS = "tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁sep"
_OF_OUTPUTS = "tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end"
_DEEPSEEK_TOOLS = _deepseek(*f"{_OF_CALLS} {_OF_OUTPUTS}".split())
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_MISTRAL = tuple(
    f"[{mark}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for mark in ("", "/")
)
_PHI = ("<|system|>", "<|user|>", "<|assistant|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>")

FAMILIES = (
    ChatFamily("qwen2.5", "qwen2_5.jinja", _CHATML, _TAGS[:2], ("<|im_end|>",), format="hermes"),
    ChatFamily(
        "qwen3",
        "qwen3.jinja",
        _CHATML,
        _TAGS,
        ("<|im_end|>",),
        format="hermes",
        rewrites="assistant",
    ),
    ChatFamily(
        "qwen3.5",
        "qwen3_5_think.jinja",
        _CHATML,
        _TAGS,
        ("<|im_end|>",),
        format="qwen3_coder",
        rewrites="assistant",
    ),
    ChatFamily(
        "llama3.1",
        "llama3_1.jinja",
        _LLAMA,
        (),
        ("<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        format="llama3",
    ),
    ChatFamily(
        "glm4.5",
        "glm4moe.jinja",
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        (*_TAGS, *_GLM_TAGS),
        _GLM_ENDS,
        format="glm",
        rewrites="assistant",
    ),
    ChatFamily(
        "deepseek-v3",
        "deepseekv3.jinja",
        _DEEPSEEK,
        _DEEPSEEK_TOOLS,
        (_DEEPSEEK[1],),
        bos=_DEEPSEEK[0],
        format="deepseek_v3",
        rewrites="assistant",
    ),
    ChatFamily(
        "deepseek-r1",
        "deepseek_r1_distill.jinja",
        _DEEPSEEK,
        (*_DEEPSEEK_TOOLS, *_TAGS[4:]),
        (_DEEPSEEK[1],),
        bos=_DEEPSEEK[0],
        rewrites="assistant",
    ),
    ChatFamily(
        "mistral",
        "mistral_v3_tekken.jinja",
        ("<s>", "</s>", "[TOOL_CALLS]", *_MISTRAL),
        (),
        ("</s>",),
        bos="<s>",
        format="mistral",
        rewrites="user",
    ),
    ChatFamily(
        "gpt-oss",
        "gptoss.jinja",
        _HARMONY,
        (),
        ("<|return|>", "<|call|>"),
        format="gpt_oss",
        rewrites="assistant",
    ),
    ChatFamily("phi3", "phi3.jinja", _PHI, (), ("<|end|>", "<|endoftext|>"), tools=False),
)
BY_NAME = {family.name: family for family in FAMILIES}

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
"""A tool."""


def every_token() -> PreTrainedTokenizerFast:
    """A tokenizer with the control tokens of all families."""
    made = deepcopy(BY_NAME["qwen2.5"].tokenizer())
    for family in FAMILIES:
        made.add_tokens([*family.special, *family.ends, *family.added], special_tokens=True)
    return made
