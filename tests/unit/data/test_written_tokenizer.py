"""Text is cut as tokenizer.json says, whatever class of transformers is named beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from megatron_opd.inputs.tokenizers import load_tokenizer

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WAYS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "llama3": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated"), BYTES]
    ),
}
CLASSES = ["LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", None]
FAMILIES = ["llama", "qwen3", "qwen2"]
MERGES = [("1", "2"), ("12", "3"), ("a", "b"), ("Ġ", "a")]


def checkpoint(path: Path, way: str | None, named: str | None, family: str) -> Tokenizer:
    """Write the text files of a checkpoint whose tokenizer.json cuts text in one of WAYS."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in MERGES:
        vocab["".join(pair)] = len(vocab)
    vocab["abc"] = len(vocab)  # no merge makes it
    found = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, ignore_merges=way == "llama3"))
    if way is None:  # as Llama 2's
        found.normalizer = normalizers.Replace(" ", "▁")
    else:
        found.pre_tokenizer, found.decoder = WAYS[way], decoders.ByteLevel()
    found.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    path.mkdir(exist_ok=True)
    found.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>", "unk_token": "<|end|>"}
    if named is not None:
        config["tokenizer_class"] = named
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.parametrize("way", WAYS)
def test_text_is_cut_as_the_file_says(way: str, named: str | None, family: str, tmp_path: Path):
    oracle = checkpoint(tmp_path, way, named, family)
    loaded: Any = load_tokenizer(tmp_path, "student.model")

    @settings(max_examples=30, deadline=None)
    @given(st.text(st.sampled_from("ab c1239\n\t é\u0301.'"), max_size=20))
    def same(text: str) -> None:
        for given_text in (text, f"{text}<|end|>\n {text}"):
            expected = oracle.encode(given_text, add_special_tokens=False).ids
            assert loaded(given_text, add_special_tokens=False)["input_ids"] == expected
            assert loaded.decode(expected) == given_text

    same()
    same_ids = oracle.encode("abc 12 1234\n\n 7<|end|>").ids
    assert loaded("abc 12 1234\n\n 7<|end|>")["input_ids"] == same_ids


def test_a_file_without_a_way_to_cut_leaves_it_to_the_class(tmp_path: Path):
    checkpoint(tmp_path, None, "LlamaTokenizer", "llama")
    expected: Any = AutoTokenizer.from_pretrained(tmp_path)
    loaded: Any = load_tokenizer(tmp_path, "student.model")
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
