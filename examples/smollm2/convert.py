"""GGUF file to a Hugging Face checkpoint: weights de-quantised, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def convert(gguf: Path, out: Path) -> None:
    """Write the Llama model in `gguf` as a bfloat16 checkpoint into `out`.

    Raises ValueError when a tensor of the model is missing in the file.
    """
    model = read_model(gguf)
    model.bfloat16().save_pretrained(out)
    read_tokenizer(gguf).save_pretrained(str(out))


def read_model(gguf: Path) -> LlamaForCausalLM:
    """De-quantise the weights.

    By transformers' reader itself: from_pretrained calls it too, but demands one more package.
    """
    config = LlamaConfig(**load_gguf_checkpoint(str(gguf))["config"])
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config)
    read = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    found = model.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = set(found.missing_keys) - tied
    if missing or found.unexpected_keys:
        raise ValueError(f"{gguf}: missing {sorted(missing)}, unknown {found.unexpected_keys}")
    model.tie_weights()
    return model


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Read vocabulary, merges, special tokens and chat template.

    SmolLM2 splits numbers into digits, which transformers' GGUF reader does not know of.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
