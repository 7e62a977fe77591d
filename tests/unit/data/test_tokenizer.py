"""The built-in character tokenizer, loaded the way a user's code loads it."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_opd.data.tasks import get_task
from megatron_opd.data.tasks.arithmetic import END_TOKEN
from megatron_opd.data.tokenizer import EOS_TOKEN, VOCAB_SIZE, build_tokenizer

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
# `<` is left out of generated text: "<eos>" written out is the end token, on purpose
texts = st.text(alphabet=ALPHABET.replace("<", ""))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    assert (path / "tokenizer.json").exists()
    assert (path / "tokenizer_config.json").exists()
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


@given(first=texts, second=texts)
def test_round_trip_and_concatenation(tokenizer, first, second):
    ids = tokenizer.encode(first, add_special_tokens=False)
    assert len(ids) == len(first)
    assert tokenizer.decode(ids) == first
    both = tokenizer.encode(first + second, add_special_tokens=False)
    assert both == ids + tokenizer.encode(second, add_special_tokens=False)


def test_ids(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert set(string.printable) - set("\t\r\x0b\x0c") == set(ALPHABET)
    assert tokenizer.encode("1<eos>") == [*tokenizer.encode("1"), 1]
    assert tokenizer.encode("é\t") == [2, 2]
    assert tokenizer.decode([*tokenizer.encode("#5"), 1], skip_special_tokens=True) == "#5"


def test_the_tasks_end_token_is_the_tokenizers():
    assert END_TOKEN == EOS_TOKEN


def test_chat_template_leaves_a_problem_as_the_models_were_trained_on_it(tokenizer):
    problem = get_task("arithmetic").generate(1, 0, 0)[0][0]
    turns = [{"role": "user", "content": problem.prompt}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == problem.prompt
    turns.append({"role": "assistant", "content": problem.response})
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == problem.prompt + problem.response + EOS_TOKEN
