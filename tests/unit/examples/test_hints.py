"""The shipped files of self-distillation with hints are what the code makes, and what they say."""

import importlib.util
import json
from collections import Counter

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from megatron_opd.cli.main import main
from megatron_opd.config.load import load_config
from megatron_opd.config.schema import Config
from megatron_opd.config.sft import SftConfig
from megatron_opd.data.tasks import get_verifier
from megatron_opd.data.tokenizer import build_tokenizer
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "hints"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What tools/make_hints.py writes, and the tool's module."""
    spec = importlib.util.spec_from_file_location("make_hints", ROOT / "tools" / "make_hints.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path_factory.mktemp("hints")
    tool.write_all(out)
    return out, tool


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_shipped_rows_are_the_tools(made, name):
    assert (EXAMPLE / name).read_bytes() == (made[0] / name).read_bytes()


def test_no_held_out_problem_was_seen(made):
    heldout = {row["prompt"] for row in rows_of(EXAMPLE / "heldout.jsonl")}
    assert len(heldout) == made[1].HELDOUT
    assert not heldout & {row["prompt"] for row in rows_of(EXAMPLE / "train.jsonl")}
    learnt = rows_of(made[0] / "sft_student.jsonl")
    problems = {row["prompt"].removesuffix("\n").rpartition("\n")[2] + "\n" for row in learnt}
    assert len(problems) > 10_000
    assert not heldout & problems


def test_every_hint_holds_its_problem_and_is_right_or_wrong_as_its_column_says():
    verify = get_verifier("arithmetic")
    rows = rows_of(EXAMPLE / "train.jsonl")
    for row in rows:
        for column in ("solution", "wrong_solution", "style", "result", "wrong_result"):
            assert row[column].endswith(row["prompt"])
            hint = row[column].removesuffix(row["prompt"])
            if column != "style":
                right = verify(hint, row["answer"])
                assert right or column.startswith("wrong"), row
    wrong = sum(verify(row["wrong_result"].split("\n")[0], row["answer"]) for row in rows)
    assert wrong < 0.02 * len(rows), "two neighbours rarely have one result"


def test_what_the_model_learns(made):
    verify, right, seen = get_verifier("arithmetic"), Counter(), Counter()
    results = {row["prompt"]: row["answer"] for row in rows_of(EXAMPLE / "train.jsonl")}
    for row in rows_of(made[0] / "sft_student.jsonl"):
        hint, _, problem = row["prompt"].removesuffix("\n").rpartition("\n")
        answer = results.get(problem + "\n")
        if answer is None:
            continue
        kind = "none" if not hint else hint[0] if hint[0] in "!#" else "solution"
        if kind == "solution" and not verify(hint, answer):
            kind = "wrong_solution"
        if "\n" not in row["response"]:
            kind += " at once"
        seen[kind] += 1
        right[kind] += verify(row["response"], answer)
    share = {kind: right[kind] / seen[kind] for kind in seen}
    assert share["solution"] == share["# at once"] == share["none at once"] == 1
    for kind in ("none", "!", "wrong_solution"):
        assert 0.3 < share[kind] < 0.5, (kind, share[kind])
    assert 0.02 < seen["none at once"] / (seen["none"] + seen["none at once"]) < 0.08


def test_the_shipped_model(made):
    path, built = EXAMPLE / "student", build_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert tokenizer.get_vocab() == built.get_vocab()
    expected = json.loads((made[0] / "student_init" / "config.json").read_text())
    config = AutoConfig.from_pretrained(path)
    for key, value in expected.items():
        if key not in ("dtype", "transformers_version"):
            assert getattr(config, key) == value, key
    with safe_open(path / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [128, 128]
    assert (path / "model.safetensors").stat().st_size < 1e6


def test_configurations_read_what_is_there(made):
    sft = load_config(SftConfig, EXAMPLE / "sft_student.yaml")
    assert (sft.init.name, sft.train.name) == ("student_init", "sft_student.jsonl")
    assert (made[0] / sft.train.name).is_file()
    run = load_config(Config, EXAMPLE / "hints.yaml")
    assert run.teacher.model == run.student.model == EXAMPLE.relative_to(ROOT) / "student"
    assert run.teacher.source.follows
    assert run.metrics.leak_every
    columns = set(rows_of(EXAMPLE / "train.jsonl")[0])
    assert {run.data.teacher_prompt_key, run.data.prompt_key, run.data.answer_key} <= columns


def test_it_passes_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    assert main(["check", "examples/hints/hints.yaml"]) == 0
    said = capsys.readouterr().out
    assert "teachers that follow the student" in said
    assert "its teacher's" in said


def test_a_column_whose_hints_cannot_be_exchanged_is_refused(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    rows = [row | {"solution": "think\n"} for row in rows_of(EXAMPLE / "train.jsonl")[:64]]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = ["--set", f"data.train={file}"]
    assert main(["check", "examples/hints/hints.yaml", *given]) == 2
    said = capsys.readouterr().err
    assert "metrics.leak_every: 16 of the first 16 hints" in said
    assert "solution does not hold the row's prompt word for word" in " ".join(said.split())
