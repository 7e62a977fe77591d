"""A teacher of another tokenizer, from the configuration to what reads its tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_opd.config.alignment import AlignmentConfig, Unaligned
from megatron_opd.config.schema import Config
from megatron_opd.data.end_tokens import EndTokens
from megatron_opd.errors import UserError
from megatron_opd.inputs.other_tokenizer import (
    OtherTokenizer,
    alignment_notes,
    other_tokenizer,
    read_by_teacher,
)
from megatron_opd.inputs.prepare import prepare
from megatron_opd.inputs.prepared import Prepared
from megatron_opd.models.shared_ids import num_shared_ids
from tests.support.cli_cases import call, refused, small_config
from tests.support.two_tokenizers import END, byte_level, fast, tiny_model, with_fallback

OURS, THEIRS = byte_level(300, prefix=False), with_fallback()
ROWS = [{"prompt": "the cat: ", "answer": "sat"}, {"prompt": "12+34=", "answer": "46"}]
DROP: dict[str, Any] = {"alignment": {"unaligned": "drop"}}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    tiny_model(root / "student", OURS)
    tiny_model(root / "teacher", THEIRS)
    tiny_model(root / "wide", THEIRS, vocab_size=320)
    return root


def config_of(tmp_path: Path, both: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    tree = small_config(tmp_path, both)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, section in ({"scoring": DROP} | sections).items():
        tree[name] = tree.get(name, {}) | section
    return tree


def prepared(tmp_path: Path, both: Path, **sections: dict[str, Any]) -> Prepared:
    return prepare(Config.model_validate(config_of(tmp_path, both, **sections)))


def other_of(found: Prepared) -> OtherTokenizer:
    assert found.other is not None
    return found.other


def test_without_the_key_the_error_names_it(
    tmp_path: Path, both: Path, capsys: pytest.CaptureFixture[str]
):
    tree = config_of(tmp_path, both)
    tree["scoring"] = {}
    refused(capsys, call(tmp_path, tree, verb="check"), "only as padding", "set scoring.alignment")
    tree["teacher"]["model"] = str(both / "wide")
    code = call(tmp_path, tree, verb="check")
    refused(capsys, code, "teacher.model", "share one tokenizer", "set scoring.alignment")


def test_the_teacher_reads_prompts_in_its_own_tokens(tmp_path: Path, both: Path):
    found = prepared(tmp_path, both)
    assert num_shared_ids(Config.model_validate(config_of(tmp_path, both))) is None
    for prompt in (next(found.prompts), next(found.prompts)):
        assert prompt.token_ids_P.tolist() == OURS.encode(prompt.text).ids
        assert prompt.teacher_ids_Q is not None
        assert prompt.teacher_ids_Q.tolist() == THEIRS.encode(prompt.text).ids
        assert other_of(found).decode(prompt.teacher_ids_Q.tolist()).strip() == prompt.text.strip()
    assert [prompt.teacher_ids_Q for prompt in found.probes["teacher"]] == [None] * 8
    spelt, shared = other_of(found).shared
    line = next(line for line in found.notes if line.startswith("scoring.alignment"))
    assert f"{shared} of {spelt} tokens" in line
    assert not any("end responses differently" in line for line in found.notes)


def test_a_hint_is_read_in_the_teacher_s_tokens(tmp_path: Path, both: Path):
    rows = [row | {"hint": "the cat sat: "} for row in ROWS]
    tree = config_of(tmp_path, both, data={"teacher_prompt_key": "hint"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = next(prepare(Config.model_validate(tree)).prompts)
    assert prompt.teacher_ids_Q is not None
    assert prompt.teacher_ids_Q.tolist() == THEIRS.encode("the cat sat: ").ids


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("the mat", []),
        ("café ☕", []),  # of bytes in either
        ("cat", [OURS.token_to_id(END)]),
        ("a<end>b", []),  # spells the name of a special token
        (" ", []),
        ("\n\n", []),
    ],
)
def test_texts_are_read_in_both_directions(tmp_path: Path, both: Path, text: str, rest: list[int]):
    found = prepared(tmp_path, both)
    other, plain = other_of(found), other_of(found).reader._encode(text)
    ids = [*other.back._encode(text), *rest]
    read = other.reader.read(ids)
    ends = [THEIRS.token_to_id(END)] * bool(rest)
    assert read.ids_R.tolist() == [*plain, *ends]
    assert THEIRS.token_to_id(END) not in plain
    assert read.spans.chunk_T.min() >= 0
    assert other.respelt([*plain, *ends]) == ids


def test_a_cut_character_is_read_up_to_it(tmp_path: Path, both: Path):
    other = other_of(prepared(tmp_path, both))
    ids = other.back._encode("a☕")[:-1]
    read = other.reader.read(ids)
    assert read.ids_R.tolist() == other.reader._encode("a")
    assert (read.spans.row_T < 0).sum() == len(ids) - 1


def test_held_out_problems_are_read_by_the_teacher_too(tmp_path: Path, both: Path):
    train = {"heldout": str(tmp_path / "train.jsonl")}
    found = prepared(tmp_path, both, data=train, evaluation={"problems": 2})
    (problems,) = found.heldout.values()
    read = read_by_teacher(problems)
    assert list(read.values()) == [THEIRS.encode(row["prompt"]).ids for row in ROWS]


def test_stop_ids_of_the_run_are_the_student_s(tmp_path: Path, both: Path):
    stop = OURS.token_to_id("+")
    found = prepared(tmp_path, both, rollout={"stop_token_ids": [stop], "max_new_tokens": 8})
    assert stop in found.ends["student"].ids
    assert found.ends["teacher"].ids == (THEIRS.token_to_id(END),)


def test_check_says_what_is_aligned(tmp_path: Path, both: Path, capsys: pytest.CaptureFixture[str]):
    assert call(tmp_path, config_of(tmp_path, both), verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "are single tokens of teacher.model's too" in said
    assert "teacher_unaligned" in said
    assert "longer tokens of the same bytes are not counted" in said


def made_of(ours: Any, theirs: Any, unaligned: Unaligned = "drop") -> OtherTokenizer:
    ends = {
        role: EndTokens((tokenizer.eos_token_id,))
        for role, tokenizer in (("student", ours), ("teacher", theirs))
    }
    return other_tokenizer(AlignmentConfig(unaligned=unaligned), ours, theirs, ends)


def pairs(letters: str) -> Any:
    words = [END, *letters, letters]
    made: Any = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    made.add_special_tokens([END])
    return fast(made)


def test_nothing_in_common_is_refused():
    with pytest.raises(UserError, match=r"unaligned must be chunk where no token .* got drop"):
        made_of(pairs("ab"), pairs("xy"))
    assert made_of(pairs("ab"), pairs("xy"), "chunk").shared == (3, 0)


def test_word_pieces_are_refused():
    made: Any = Tokenizer(models.WordPiece({"a": 0, "##b": 1, END: 2}, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match=r"tokenizer of teacher\.model: .* got WordPiece"):
        made_of(pairs("ab"), fast(made))


def test_what_the_tokenizers_share_is_said():
    drop, chunk = AlignmentConfig(), AlignmentConfig(unaligned="chunk")
    same = alignment_notes(drop, made_of(fast(OURS), fast(OURS)))
    assert any("mean the same" in line for line in same)
    other = made_of(fast(THEIRS), fast(OURS))
    bytes_of = {each for each in other.back.ours.of_V if each}
    lacking = len(bytes_of - set(other.reader.ours.of_V))
    (_, line) = alignment_notes(drop, other)
    assert f"{lacking} tokens of teacher.model's are none of student.model's" in line
    assert len(alignment_notes(chunk, other)) == 1
    assert len(alignment_notes(drop, made_of(fast(OURS), fast(OURS)))) == 2
