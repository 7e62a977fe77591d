"""The end tokens of public checkpoints, written anew as small fixtures without weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

ABSENT = object()
"""Stands for a key, or a generation_config.json, that is not there."""


@dataclass(frozen=True)
class Published:
    """What a checkpoint publishes of its ends.

    tokens: its special tokens by their texts. eos: which of them the tokenizer ends with. parts:
    config.json says it in its text_config.
    """

    model_type: str
    architecture: str
    vocab_size: int
    config: Any
    generation: Any
    eos: str | None
    tokens: Mapping[str, int]
    parts: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write config.json, generation_config.json and a tokenizer."""
        path.mkdir(parents=True)
        text = {"vocab_size": self.vocab_size, **self.more}
        if self.config is not ABSENT:
            text["eos_token_id"] = self.config
        tree: dict[str, Any] = {"text_config": text} if self.parts else text
        tree |= {"model_type": self.model_type, "architectures": [self.architecture]}
        (path / "config.json").write_text(json.dumps(tree))
        if self.generation is not ABSENT:
            named = {"_from_model_config": True, "eos_token_id": self.generation}
            (path / "generation_config.json").write_text(json.dumps(named))
        words = {word: i for i, word in enumerate("abc") if i not in self.tokens.values()}
        tokenizer = Tokenizer(models.WordLevel({**words, **self.tokens}, unk_token="a"))
        tokenizer.add_special_tokens(list(self.tokens))
        named = {} if self.eos is None else {"eos_token": self.eos}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(path)
        return path


LLAMA3 = {"<|end_of_text|>": 128001, "<|eom_id|>": 128008, "<|eot_id|>": 128009}
LLAMA3_FIRST = {"<|end_of_text|>": 128001, "<|eot_id|>": 128009}
QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
SENTENCES = {"<s>": 1, "</s>": 2}
GEMMA3_PARTS = "Gemma3ForConditionalGeneration"
GEMMA = {"<pad>": 0, "<eos>": 1, "<end_of_turn>": 106}
PHI3 = {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007}
PHI4_MINI = {"<|endoftext|>": 199999, "<|end|>": 200020}
CHATML = {"<|endoftext|>": 100257, "<|im_end|>": 100265}
SMOLLM3 = {"<|end_of_text|>": 128001, "<|eom_id|>": 128008, "<|im_end|>": 128012}
COHERE = {"<BOS_TOKEN>": 5, "<|END_OF_TURN_TOKEN|>": 255001}
GPT_OSS_ENDS = [200002, 199999, 200012]
GPT_OSS = {"<|endoftext|>": 199999, "<|return|>": 200002, "<|call|>": 200012}
GLM_ENDS = [151329, 151336, 151338]
GLM = {"<|endoftext|>": 151329, "<|user|>": 151336, "<|observation|>": 151338}
R1 = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def _llama(vocab: int, config: Any, generation: Any, eos: str, tokens: Mapping[str, int]) -> Any:
    return Published("llama", "LlamaForCausalLM", vocab, config, generation, eos, tokens)


def _qwen(version: str, config: Any, generation: Any, eos: str, tokens: Any = QWEN) -> Published:
    kind = {"2": "Qwen2", "3": "Qwen3", "3_moe": "Qwen3Moe"}[version]
    name = f"qwen{version}", f"{kind}ForCausalLM"
    return Published(*name, 151936, config, generation, eos, tokens)


def _phi(vocab: int, config: Any, generation: Any, eos: str, tokens: Mapping[str, int]) -> Any:
    found = Published("phi3", "Phi3ForCausalLM", vocab, config, generation, eos, tokens)
    return replace(found, more={"pad_token_id": tokens["<|endoftext|>"]})


PUBLISHED: dict[str, Published] = {
    "Llama-2": _llama(32000, 2, 2, "</s>", SENTENCES),
    "Llama-2-chat": _llama(32000, 2, 2, "</s>", SENTENCES),
    "TinyLlama-chat": _llama(32000, 2, 2, "</s>", SENTENCES),
    "Llama-3": _llama(128256, 128001, 128001, "<|end_of_text|>", LLAMA3_FIRST),
    "Llama-3-Instruct": _llama(128256, 128009, [128001, 128009], "<|eot_id|>", LLAMA3_FIRST),
    "Llama-3-Instruct-first": _llama(128256, 128001, ABSENT, "<|end_of_text|>", LLAMA3_FIRST),
    "Llama-3.1": _llama(128256, 128001, 128001, "<|end_of_text|>", LLAMA3),
    "Llama-3.1-Instruct": _llama(
        128256, [128001, 128008, 128009], [128001, 128008, 128009], "<|eot_id|>", LLAMA3
    ),
    "Llama-3.2": _llama(128256, 128001, 128001, "<|end_of_text|>", LLAMA3),
    "Llama-3.2-Instruct": _llama(
        128256, [128001, 128008, 128009], [128001, 128008, 128009], "<|eot_id|>", LLAMA3
    ),
    "R1-Distill-Llama": _llama(128256, 128001, 128001, R1, {R1: 128001, "<|eom_id|>": 128008}),
    "Hermes-3-Llama": _llama(
        128256, 128040, [128001, 128008, 128009], "<|im_end|>", {**LLAMA3, "<|im_end|>": 128040}
    ),
    "Qwen2": _qwen("2", 151643, 151643, "<|endoftext|>"),
    "Qwen2-Instruct": _qwen("2", 151645, [151645, 151643], "<|im_end|>"),
    "Qwen2.5": _qwen("2", 151643, 151643, "<|endoftext|>"),
    "Qwen2.5-Instruct": _qwen("2", 151645, [151645, 151643], "<|im_end|>"),
    "QwQ": _qwen("2", 151645, [151645, 151643], "<|im_end|>"),
    "R1-Distill-Qwen": _qwen("2", 151643, 151643, R1, {R1: 151643}),
    "Qwen3-Base": _qwen("3", 151643, 151643, "<|endoftext|>"),
    "Qwen3": _qwen("3", 151645, [151645, 151643], "<|im_end|>"),
    "Qwen3-MoE": _qwen("3_moe", 151645, [151645, 151643], "<|im_end|>"),
    "Mistral-Instruct": Published("mistral", "MistralForCausalLM", 32768, 2, 2, "</s>", SENTENCES),
    "Mistral-Nemo": Published("mistral", "MistralForCausalLM", 131072, 2, 2, "</s>", SENTENCES),
    "Zephyr": Published("mistral", "MistralForCausalLM", 32000, 2, ABSENT, "</s>", SENTENCES),
    "Mixtral-Instruct": Published("mixtral", "MixtralForCausalLM", 32000, 2, 2, "</s>", SENTENCES),
    "Gemma-2": Published("gemma2", "Gemma2ForCausalLM", 256000, 1, 1, "<eos>", GEMMA),
    "Gemma-2-it": Published("gemma2", "Gemma2ForCausalLM", 256000, 1, [1, 107], "<eos>", GEMMA),
    "Gemma-3-1b-it": Published(
        "gemma3_text", "Gemma3ForCausalLM", 262144, [1, 106], [1, 106], "<eos>", GEMMA
    ),
    "Gemma-3-parts": replace(
        Published("gemma3", GEMMA3_PARTS, 262208, [1, 106], ABSENT, "<eos>", GEMMA), parts=True
    ),
    "Phi-3-mini": _phi(32064, 32000, [32000, 32001, 32007], "<|endoftext|>", PHI3),
    "Phi-4": _phi(100352, 100265, 100265, "<|im_end|>", CHATML),
    "Phi-4-mini": _phi(200064, 199999, [200020, 199999], "<|endoftext|>", PHI4_MINI),
    "DeepSeek-V2-Chat": Published(
        "deepseek_v2", "DeepseekV2ForCausalLM", 102400, 100001, 100001, R1, {R1: 100001}
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3", "DeepseekV3ForCausalLM", 129280, 1, 1, R1, {"<bos>": 0, R1: 1}
    ),
    "OLMo": Published(
        "olmo", "OlmoForCausalLM", 50304, 50279, 50279, "<|endoftext|>", {"<|endoftext|>": 50279}
    ),
    "OLMo-2-Instruct": Published(
        "olmo2", "Olmo2ForCausalLM", 100352, 100257, 100257, "<|endoftext|>", CHATML
    ),
    "SmolLM2": _llama(49152, 0, 0, "<|endoftext|>", {"<|endoftext|>": 0, "<|im_end|>": 2}),
    "SmolLM2-Instruct": _llama(49152, 2, 2, "<|im_end|>", {"<|endoftext|>": 0, "<|im_end|>": 2}),
    "SmolLM3": Published(
        "smollm3", "SmolLM3ForCausalLM", 128256, 128012, 128012, "<|im_end|>", SMOLLM3
    ),
    "Granite-3": Published(
        "granite", "GraniteForCausalLM", 49155, 0, 0, "<|end_of_text|>", {"<|end_of_text|>": 0}
    ),
    "Yi-Chat": _llama(64000, 2, 7, "<|im_end|>", {"<|endoftext|>": 2, "<|im_end|>": 7}),
    "InternLM-Chat": _llama(92544, 2, [2, 92542], "</s>", {**SENTENCES, "<|im_end|>": 92542}),
    "GLM-4-Chat": Published(
        "glm", "GlmForCausalLM", 151552, GLM_ENDS, GLM_ENDS, "<|endoftext|>", GLM
    ),
    "GLM-4-0414": Published(
        "glm4", "Glm4ForCausalLM", 151552, GLM_ENDS, ABSENT, "<|endoftext|>", GLM
    ),
    "Command-R": Published(
        "cohere", "CohereForCausalLM", 256000, 255001, 255001, "<|END_OF_TURN_TOKEN|>", COHERE
    ),
    "Falcon": Published(
        "falcon", "FalconForCausalLM", 65024, 11, 11, "<|endoftext|>", {"<|endoftext|>": 11}
    ),
    "Falcon3-Instruct": _llama(131072, 11, 11, "<|endoftext|>", {"<|endoftext|>": 11}),
    "StableLM-2-Chat": Published(
        "stablelm", "StableLmForCausalLM", 100352, 100257, 100257, "<|endoftext|>", CHATML
    ),
    "GPT-OSS": Published(
        "gpt_oss", "GptOssForCausalLM", 201088, 200002, GPT_OSS_ENDS, "<|return|>", GPT_OSS
    ),
    "K2-Horizon": _llama(
        64000, 1, ABSENT, "<|endoftext|>", {"<|endoftext|>": 1, "<|ifm|im_end|>": 9}
    ),
}
