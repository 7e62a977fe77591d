"""Examples for fine-tuning against a run's prompts and transformers' own rendering."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_opd.config.sft import SftConfig
from megatron_opd.data.answers import Example
from megatron_opd.data.examples import ExampleRules, example_rules, read_examples
from megatron_opd.data.messages import read_chat
from megatron_opd.data.render import Rendered, Rendering, render_prompts
from megatron_opd.models.spec import read_model_spec
from tests.support.framed import BOS, STOP, TURN, framed

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    f"{TURN}{{{{ m.role }}}}\n{{{{ m.content }}}}{STOP}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant\n{{% endif %}}"
)
# leaves the thoughts of earlier answers out
THINKS = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "<think>hm</think>2"},
    {"role": "user", "content": "and 1+2?"},
    {"role": "assistant", "content": "<think>so</think>3"},
]


def tokenizer_with(template: str | None) -> Any:
    made = framed()
    made.chat_template = template
    return made


def rules(tokenizer: Any, *, chats: bool = False, **changes: Any) -> ExampleRules:
    stop = tokenizer.convert_tokens_to_ids(STOP)
    ends = {"end_ids": frozenset({stop, tokenizer.eos_token_id}), "end_id": tokenizer.eos_token_id}
    how = Rendering(tokenizer.chat_template is not None)
    given = {"rendering": how, "max_tokens": 999, **ends, **changes}
    return ExampleRules("prompt", "response", "messages" if chats else None, **given)


def pairs_of(path: Path, tokenizer: Any, row: dict[str, Any], **changes: Any) -> list[Example]:
    file = path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return read_examples(
        file, tokenizer, rules(tokenizer, chats="messages" in row, **changes)
    ).examples


def prompt_of(example: Example) -> list[int]:
    """The ids before an example's first answer."""
    return example.ids_S[: example.runs[0].start].tolist()


def learnt(example: Example) -> list[int]:
    """The ids that an example learns."""
    return example.ids_S[example.position_T].tolist()


def prompt_of_a_run(tokenizer: Any, prompt: Any) -> list[int]:
    how = Rendering(tokenizer.chat_template is not None)
    (found,) = render_prompts([prompt], tokenizer, how)
    assert isinstance(found, Rendered)
    return found.ids


@pytest.mark.parametrize("text", ["1+1=", f"{BOS}1+1="])
def test_a_text_begins_as_in_a_run(tmp_path: Path, text: str):
    """Before: without BOS."""
    tokenizer = tokenizer_with(None)
    (pair,) = pairs_of(tmp_path, tokenizer, {"prompt": text, "response": "2"})
    assert prompt_of(pair) == prompt_of_a_run(tokenizer, text)
    assert prompt_of(pair) == tokenizer("1+1=")["input_ids"]
    assert learnt(pair) == [*tokenizer.encode("2", add_special_tokens=False), 1]


def test_a_response_begins_where_its_prompt_ends(tmp_path: Path):
    """A tokenizer that begins every text with a blank does not put one between the two."""
    words = ["<unk>", "▁", "a", "b", "▁a", "▁b", "</s>"]
    unigram = models.Unigram([(word, -1.0) for word in words], unk_id=0)
    backend = Tokenizer(unigram)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("b")) == ["▁b"]
    (pair,) = pairs_of(tmp_path, tokenizer, {"prompt": "a", "response": "b"})
    ids = [*prompt_of(pair), *learnt(pair)]
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", "b", "</s>"]


@pytest.mark.parametrize(("template", "sequences"), [(TEMPLATE, 1), (THINKS, 2)])
def test_every_answer_of_a_chat_is_learnt(tmp_path: Path, template: str, sequences: int):
    """Its prompt is the run's, whatever the template does with earlier answers."""
    tokenizer = tokenizer_with(template)
    found = pairs_of(tmp_path, tokenizer, {"messages": CHAT})
    assert len(found) == sequences
    answers = [
        (example.ids_S.tolist(), run.start, run.stop) for example in found for run in example.runs
    ]
    for (ids, start, stop), end in zip(answers, (2, 4), strict=True):
        before = read_chat({"m": CHAT[:end]}, "m")
        assert ids[:start] == prompt_of_a_run(tokenizer, before)
        whole = tokenizer.apply_chat_template(CHAT[: end + 1], return_dict=False)
        assert ids[:stop] == whole[:stop]
        # the answer and its end token, and not what the template writes behind it
        assert tokenizer.decode(ids[start:stop]) == f"{CHAT[end]['content']}{STOP}"
        assert tokenizer.decode(whole[stop:]) == "\n"


def test_a_prompt_and_its_response_are_a_chat(tmp_path: Path):
    tokenizer = tokenizer_with(TEMPLATE)
    for prompt in ("1+1=", [{"role": "user", "content": "1+1="}]):
        (pair,) = pairs_of(tmp_path, tokenizer, {"prompt": prompt, "response": "2"})
        assert prompt_of(pair) == prompt_of_a_run(tokenizer, "1+1=")
        assert tokenizer.decode(learnt(pair)) == f"2{STOP}"


def test_columns_that_no_key_names_are_told(tmp_path: Path):
    """Before: the second half of an instruction was left out in silence."""
    row, file = {"prompt": "Add:", "input": "1+1", "response": "2"}, tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (note,) = read_examples(file, tokenizer_with(None), rules(tokenizer_with(None))).notes
    assert note == f"{file}: no key names the columns 'input', which are not read"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_what_stands_behind_an_end_token_is_told(template: str | None, tmp_path: Path):
    """Before: it was left out in silence."""
    tokenizer, file = tokenizer_with(template), tmp_path / "rows.jsonl"

    def found(*responses: str) -> tuple[list[str], list[str]]:
        rows = ({"prompt": "1+1=", "response": each} for each in responses)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        read = read_examples(file, tokenizer, rules(tokenizer))
        return [tokenizer.decode(learnt(pair)) for pair in read.examples], read.notes

    kept, notes = found("2", f"2{STOP}{TURN}user\nand 1+2?", f"2{STOP}\n")
    assert kept[1:] == [f"2{STOP}"] * 2
    (note,) = notes
    assert "1 of 3 examples have answers that hold an end token" in note
    assert f"rows.jsonl:2: {STOP} before {TURN + 'user'}"[:25] in note
    assert found("2", f"2{STOP}")[1] == []


def test_an_answer_that_its_template_does_not_end_gets_an_end(tmp_path: Path):
    tokenizer = tokenizer_with(TEMPLATE)
    only_eos = {"end_ids": frozenset({tokenizer.eos_token_id})}
    row = {"prompt": "1+1=", "response": "2 "}
    (pair,) = pairs_of(tmp_path, tokenizer, row, **only_eos)
    assert tokenizer.decode(learnt(pair)) == f"2 {STOP}<eos>"
    found = read_examples(tmp_path / "rows.jsonl", tokenizer, rules(tokenizer, **only_eos))
    (note,) = found.notes
    assert "1 of 1 examples have answers that the chat template does not end" in note
    assert f"{STOP!r} is behind the answer, <eos> is added" in note
    tokenizer.chat_template = TEMPLATE.replace(f"{STOP}\n", "")
    (pair,) = pairs_of(tmp_path, tokenizer, row)
    assert tokenizer.decode(learnt(pair)) == "2 <eos>"


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (None, {"prompt": [CHAT[1]], "response": "2"}, "need chat_template: true"),
        (TEMPLATE, {"messages": "1+1=2"}, "must be a list of messages, got a text"),
        (TEMPLATE, {"messages": CHAT[:2]}, "no assistant's message behind a user's"),
        (TEMPLATE, {"messages": [CHAT[2], CHAT[1]]}, "no assistant's message behind a user's"),
        (TEMPLATE, {"messages": [CHAT[1], CHAT[2], CHAT[2]]}, "message 2, an answer, is followed"),
        (
            TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%"),
            {"messages": CHAT[1:3]},
            r"begins an answer with '.*<think>\\n' and writes this one with '.*<think>hm",
        ),
        (
            TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
            {"messages": CHAT[1:3]},
            "does not write the answer '<think>hm</think>2' as it is",
        ),
        (TEMPLATE, {"prompt": f"{TURN}assistant", "response": "2"}, "which the chat template wri"),
    ],
)
def test_what_cannot_be_learnt_as_it_is_sampled_is_refused(
    tmp_path: Path, template: str | None, row: dict[str, Any], words: str
):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{words}"):
        pairs_of(tmp_path, tokenizer_with(template), row)


def test_what_ends_a_response_is_what_the_servers_of_the_model_end_at(models: Path, tmp_path: Path):
    """Also an id that only generation_config.json names."""
    init = tmp_path / "init"
    shutil.copytree(models / "student", init)
    tokenizer = tokenizer_with(TEMPLATE)
    stop = tokenizer.convert_tokens_to_ids(STOP)
    (init / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 1]}))
    (init / "own.jinja").write_text(TEMPLATE)
    given = {"init": str(init), "output": "x", "train": "x", "chat_template": init / "own.jinja"}
    config = SftConfig.model_validate(given)
    found = example_rules(config, tokenizer, read_model_spec(init), datetime(2024, 1, 1))
    assert found.end_ids >= {stop, 1}
    assert found.end_id == tokenizer.eos_token_id


def test_an_answer_whose_calls_or_thoughts_are_not_written_is_told_or_refused(tmp_path):
    tokenizer = tokenizer_with(TEMPLATE)
    call = {"function": {"name": "f", "arguments": {}}}
    asked = {"role": "user", "content": "a"}
    file = tmp_path / "rows.jsonl"
    for answer, message in (
        ({"content": "b", "tool_calls": [call]}, "does not write the answer's tool_calls; leave"),
        ({"content": None, "tool_calls": [call]}, "does not write the answer's tool_calls; leave"),
        ({"content": "b", "reasoning_content": "hm"}, None),
    ):
        file.write_text(json.dumps({"messages": [asked, {"role": "assistant", **answer}]}))
        if message is None:
            (note,) = read_examples(file, tokenizer, rules(tokenizer, chats=True)).notes
            assert "thoughts of which the chat template writes nothing" in note
            continue
        with pytest.raises(ValueError, match=message):
            read_examples(file, tokenizer, rules(tokenizer, chats=True))


def test_a_text_that_ends_with_an_end_token_gets_no_other(tmp_path):
    tokenizer = tokenizer_with(None)
    stop = tokenizer.convert_tokens_to_ids(STOP)
    (pair,) = pairs_of(tmp_path, tokenizer, {"prompt": "a", "response": f"b{STOP}"})
    assert learnt(pair) == [*tokenizer("b", add_special_tokens=False).input_ids, stop]


def test_nothing_but_the_turns_end_is_behind_an_empty_answer(tmp_path):
    tokenizer = tokenizer_with(TEMPLATE)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    own = {"end_ids": frozenset({tokenizer.eos_token_id})}
    (pair,) = pairs_of(tmp_path, tokenizer, row, **own)
    stop = tokenizer.convert_tokens_to_ids(STOP)
    assert learnt(pair) == [stop, tokenizer.eos_token_id]
