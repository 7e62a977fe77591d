"""Tokenizers are compared by content: what decides ids is told apart, spellings are not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.inputs.same_tokenizer import (
    check_tokenizer,
    difference,
    end_notes,
    further_tokens,
    tokenizer_parts,
)
from megatron_opd.inputs.tokenizers import load_tokenizer
from tests.support.cli_cases import call, refused, small_config, tiny_models

VOCAB = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "ab": 5, "bc": 6}
MERGES = [("a", "b"), ("b", "c")]


def build(change: Callable[[Tokenizer], None] | None = None, merges=MERGES, **options):
    tokenizer = Tokenizer(models.BPE(vocab=VOCAB, merges=merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if change is not None:
        change(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def told(other: PreTrainedTokenizerFast) -> str | None:
    return difference(tokenizer_parts(build()), tokenizer_parts(other))


def lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def digits(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: build(lower), ["normalizer", "Lowercase"]),
        (lambda: build(digits), ["pre_tokenizer", "Digits"]),
        (lambda: build(merges=MERGES[::-1]), ["2 of their merges", "number 0"]),
        (lambda: build(merges=MERGES[:1]), ["1 of their merges", "number 1", "none"]),
        (lambda: build(unk_token="a"), ["model.unk_token"]),
        (lambda: build(ignore_merges=True), ["model.ignore_merges"]),
        (lambda: build(lambda t: t.add_tokens(["c"]) and None), ["1 of their added tokens", '"c"']),
    ],
)
def test_each_part_is_named(other: Callable[[], PreTrainedTokenizerFast], words: list[str]):
    found = told(other())
    assert found is not None
    for word in words:
        assert word in found


def test_same_content_in_another_spelling_is_the_same(tmp_path: Path):
    """Merges as pairs or as words, other indentation, other special names, a chat template."""
    build().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["merges"] = [" ".join(pair) for pair in MERGES]
    path.write_text(json.dumps(tree, indent=1, sort_keys=True))
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    loaded.chat_template = "{{ messages }}"
    assert told(loaded) is None


def test_a_tokenizer_without_a_backend_is_its_vocabulary():
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"b": 1, "a": 0}

    assert tokenizer_parts(Slow()) == {"model": {"vocab": {"b": 1, "a": 0}}}  # type: ignore[arg-type]


def longer(change: Callable[[Tokenizer], None]) -> PreTrainedTokenizerFast:
    """The tokenizer of `build` with one more merge, word and added token behind its own."""
    vocab = VOCAB | {"abc": 7, "d": 8}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[*MERGES, ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    change(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def thinks(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<think>"])


def test_a_teacher_may_have_more_tokens_at_the_end(tmp_path: Path):
    """Before: refused, although every id of the student's means the same."""
    ours, theirs = build(), longer(thinks)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert (
        check_tokenizer(tmp_path, "teacher.model", ours, "refuse").get_vocab() == theirs.get_vocab()
    )
    further = further_tokens(ours.get_vocab(), theirs.get_vocab(), "teacher.model")
    assert further == {"abc", "d", "<think>"}
    assert {i for token, i in theirs.get_vocab().items() if token in further} == {7, 8, 9}
    # they are judged by what is left: the text is cut otherwise than the student cuts it

    def both(tokenizer: Tokenizer) -> None:
        thinks(tokenizer)
        lower(tokenizer)

    longer(both).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="they differ in normalizer"):
        check_tokenizer(tmp_path, "teacher.model", ours, "refuse")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"a": 0, "b": 1}, {"a": 1, "b": 0, "c": 2}, r"4 entries differ, first \('a', 0\)"),
        ({"a": 0, "c": 2}, {"a": 0, "b": 1, "c": 2}, r"1 entries differ, first \('b', 1\)"),
        ({"a": 0, "b": 1}, {"a": 0}, r"1 entries differ, first \('b', 1\)"),
        ({"a": 0, "b": 1}, {"a": 0, "b": 2}, r"1 entries differ, first \('b', 1\)"),
    ],
)
def test_a_teacher_may_not_have_others(ours: dict[str, int], theirs: dict[str, int], words: str):
    with pytest.raises(UserError, match=words):
        further_tokens(ours, theirs, "teacher.model")


def with_more_tokens(tmp_path: Path, config: dict[str, Any]) -> None:
    """Give the teacher two tokens more than the student has."""
    copy = tmp_path / "longer"
    shutil.copytree(config["teacher"]["model"], copy)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(copy)
    config["teacher"]["model"] = str(copy)


def test_more_tokens_are_said(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    with_more_tokens(tmp_path, config)
    assert call(tmp_path, config, verb="check") == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "teacher.modelhas2moretokensthanstudent.model's,suchas'</think>';everyid" in shown


def test_a_teacher_that_selects_has_no_more_tokens(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """What it selects could be an id of which the student has no token."""
    with_more_tokens(tmp_path, config)
    config |= {"objective": {"type": "forward_kl"}, "support": {"type": "teacher_topk"}}
    code = call(tmp_path, config, verb="check")
    refused(capsys, code, "teacher.model has 2 more tokens", "use a support of the student's")


def test_a_run_refuses_warns_or_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """Equal ids and equal sizes: only the content tells."""
    models_dir = tiny_models(tmp_path / "models")
    config = small_config(tmp_path, models_dir)
    capsys.readouterr()  # what writing models prints
    path = models_dir / "teacher" / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tree))
    words = ("student.model and teacher.model", "they differ in normalizer", "scoring.guard")
    refused(capsys, call(tmp_path, config, verb="check"), *words)
    assert call(tmp_path, config | {"scoring": {"guard": "warn"}}, verb="check") == 0
    assert [r for r in caplog.records if "they differ in normalizer" in r.getMessage()]
    caplog.clear()
    assert call(tmp_path, config | {"scoring": {"guard": "off"}}, verb="check") == 0
    assert caplog.records == []


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_an_id_of_billions_is_refused_before_the_library_walks_up_to_it(tmp_path: Path, name: str):
    """Before: 22 s of processor time for one id of 2**31."""
    large: dict[str, Any] = {"a": 0, "b": 2**31}
    tree = {"model": {"type": "BPE", "vocab": large}} if name == "tokenizer.json" else large
    (tmp_path / name).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"teacher\.model: an id of .* at most 16777216, got 2147"):
        load_tokenizer(tmp_path, "teacher.model")


@pytest.mark.parametrize("added", [True, 3, "x", {"id": 2**31}])
def test_added_tokens_that_are_no_list_are_the_library_s_to_refuse(tmp_path: Path, added: Any):
    tree = {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"^teacher\.model: "):
        load_tokenizer(tmp_path, "teacher.model")


def test_other_ends_of_a_teacher_are_a_note_that_says_what_to_set():
    ours = build()
    ends = {"student": EndTokens((1,), 1), "teacher": EndTokens((6,), 6)}
    (line,) = end_notes(ends, ours, "refuse")
    assert "the run ends at 1 '<eos>', teacher.model at 6 'bc'" in line
    assert "set rollout.stop_token_ids to [6]" in line
    asked = {"student": EndTokens((1,), 1, asked=(6,)), "teacher": EndTokens((6,), 6, asked=(6,))}
    (line,) = end_notes(asked, ours, "off")
    assert "the run ends at 1 '<eos>', 6 'bc'" in line
    assert "stop_token_ids" not in line
    assert end_notes({"student": ends["student"], "teacher": ends["student"]}, ours, "warn") == []
