"""Data files from rows of the shapes that the data sets are published in."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.tools import exit_code

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def prepared(name: str, out: Path, *words: str | Path) -> list[dict[str, Any]]:
    assert exit_code("prepare_data", name, *map(str, words), "-o", str(out)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def dapo(problem: str, answer: str, index: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{HEAD}{problem}{TAIL}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_gsm8k(tmp_path: Path):
    solution = "She sold 48/2 = <<48/2=24>>24 clips.\n48+24 = 72\n#### 1,072"
    rows = [{"question": "How many clips? ", "answer": solution}]
    for path in (table(tmp_path / "a.parquet", *rows), jsonl(tmp_path / "a.jsonl", *rows)):
        (row,) = prepared("gsm8k", tmp_path / f"{path.suffix[1:]}.out.jsonl", path)
        assert row == {
            "id": "gsm8k-1",
            "prompt": f"How many clips?{BOXED}",
            "answer": "1072",
            "problem": "How many clips?",
            "source": "gsm8k",
        }


def test_deepmath(tmp_path: Path):
    row = {
        "question": "Evaluate $\\int_0^1 x\\,dx$.",
        "final_answer": "\\frac{1}{2}",
        "difficulty": 4.5,
        "topic": "Calculus",
        "r1_solution_1": "long",
    }
    (found,) = prepared("deepmath", tmp_path / "o.jsonl", table(tmp_path / "a.parquet", row))
    assert (found["answer"], found["difficulty"], found["topic"]) == (
        "\\frac{1}{2}",
        4.5,
        "Calculus",
    )
    assert "r1_solution_1" not in found


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("aime24", {"id": 60, "problem": "P", "solution": "s", "answer": "073"}, "73"),
        ("aime24", {"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204}, "204"),
        ("aime24", {"id": 3, "problem": "P", "solution": "so \\boxed{025}", "url": "u"}, "25"),
        ("aime25", {"question": "P", "answer": "588"}, "588"),
        ("amc23", {"id": 0, "question": "P", "answer": 27.0, "url": "u"}, "27"),
        ("amc23", {"problem": "P", "answer": "\\frac{3}{2}"}, "\\frac{3}{2}"),
        (
            "amc23",
            {"problem": "P", "solution": "\\boxed{1}, \\boxed{\\frac{a}{b}}"},
            "\\frac{a}{b}",
        ),
    ],
)
def test_competitions(tmp_path: Path, name: str, row: dict[str, Any], answer: str):
    (found,) = prepared(name, tmp_path / "o.jsonl", jsonl(tmp_path / "a.jsonl", row))
    assert (found["problem"], found["answer"]) == ("P", answer)
    assert found["id"] == str(row.get("id", row.get("ID", f"{name}-1")))


def test_dapos_repetitions_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [dapo("Find $x$.", "34", "i-1")] * 3 + [dapo("Find y.", "5", "i-2")]
    found = prepared("dapo", tmp_path / "o.jsonl", table(tmp_path / "a.parquet", *rows))
    assert [(row["id"], row["problem"], row["answer"]) for row in found] == [
        ("i-1", "Find $x$.", "34"),
        ("i-2", "Find y.", "5"),
    ]
    assert found[0]["prompt"] == f"Find $x$.{BOXED}"
    said = capsys.readouterr().out
    assert f"left out: 2 repeated, first {tmp_path / 'a.parquet'} row 2" in said
    assert "2 problems" in said
    processed = jsonl(tmp_path / "p.jsonl", {"prompt": "Find z.", "solution": "6"})
    (row,) = prepared("dapo", tmp_path / "p.out.jsonl", processed)
    assert (row["problem"], row["answer"]) == ("Find z.", "6")


@pytest.mark.parametrize(
    ("form", "prompt"),
    [("plain", "P?"), ("answer_line", f"{HEAD}P?{TAIL}"), ("boxed", f"P?{BOXED}")],
)
def test_forms_ask_for_the_answer_in_their_way(tmp_path: Path, form: str, prompt: str):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "P?", "answer": "1"})
    (row,) = prepared("dapo", tmp_path / "o.jsonl", path, "--form", form)
    assert row["prompt"] == prompt
    # whichever form it was written in, the problem is found again
    again = jsonl(tmp_path / "b.jsonl", {"prompt": row["prompt"], "answer": "1"})
    (same,) = prepared("dapo", tmp_path / "o2.jsonl", again)
    assert same["problem"] == "P?"


def test_no_problem_of_an_excluded_file_is_written(tmp_path: Path, capsys):
    chat = [{"role": "user", "content": f"What is  1 + 1?{BOXED}"}]
    heldout = jsonl(
        tmp_path / "held.jsonl", {"prompt": chat}, {"prompt": "y", "problem": "Find $A$"}
    )
    train = jsonl(
        tmp_path / "a.jsonl",
        {"question": "what is 1+1?", "answer": "#### 2"},
        {"question": "Find A", "answer": "#### 2"},
        {"question": "What is 1-1?", "answer": "#### 0"},
    )
    found = prepared("gsm8k", tmp_path / "o.jsonl", train, "--exclude", heldout)
    assert [row["problem"] for row in found] == ["What is 1-1?"]
    assert f"left out: 2 excluded, first {train}:1" in capsys.readouterr().out


def test_contradictions_are_left_out_and_counted(tmp_path: Path, capsys):
    rows = [{"prompt": "P", "answer": a} for a in ("1", "2", "1")] + [
        {"prompt": "Q", "answer": "1"}
    ]
    found = prepared("dapo", tmp_path / "o.jsonl", jsonl(tmp_path / "a.jsonl", *rows))
    assert [row["problem"] for row in found] == ["Q"]
    assert "left out: 3 with contradicting answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("gsm8k", {"question": "q", "answer": "72"}, "the answer has no ####"),
        ("gsm8k", {"question": "q", "answer": "####  "}, "the answer is empty"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "the problem is empty"),
        ("gsm8k", {"question": 5, "answer": "#### 1"}, "must be text or one message, got int"),
        ("gsm8k", {"text": "q"}, "no column question; the columns are text"),
        ("aime24", {"problem": "q", "answer": "1000"}, "a whole number 0..999, got '1000'"),
        ("aime24", {"problem": "q", "solution": "no box"}, "the solution has no \\boxed{...}"),
        ("aime24", {"problem": "q", "solution": "\\boxed{1"}, "the solution has no \\boxed{...}"),
        ("amc23", {"problem": "q", "answer": True}, "must be text or a number, got bool"),
        ("dapo", {"prompt": [], "answer": "1"}, "must be text or one message, got list"),
    ],
)
def test_a_row_that_is_no_problem_is_counted_with_its_place(
    tmp_path: Path, capsys, name: str, row: dict[str, Any], words: str
):
    path = jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(SystemExit) as caught:
        prepared(name, tmp_path / "o.jsonl", path)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert f"left out: 1 no problem with an answer, first {path}:1: " in said.out
    assert words in said.out
    assert f"error: no problem of {path} can be written" in said.err
    assert not (tmp_path / "o.jsonl").exists()


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, capsys):
    good = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "#### 1"})
    empty = jsonl(tmp_path / "empty.jsonl")
    odd = jsonl(tmp_path / "odd.jsonl", {"text": "q"})
    new = tmp_path / "o.jsonl"
    for words, line in (
        ([tmp_path / "none.jsonl", "-o", new], "data file not found"),
        ([good, "-o", good], "-o must name a new .jsonl file"),
        ([good, "-o", tmp_path / "o.txt"], "-o must name a new .jsonl file"),
        ([good, "-o", tmp_path / "no" / "o.jsonl"], "-o must name a new .jsonl file"),
        ([good, "-o", new, "--exclude", empty], "empty.jsonl holds no rows"),
        ([good, "-o", new, "--exclude", odd], "odd.jsonl:1: missing column 'prompt'"),
        ([tmp_path / "*.csv", "-o", new], "data file not found: no file fits"),
    ):
        with pytest.raises(SystemExit) as caught:
            exit_code("prepare_data", "gsm8k", *map(str, words))
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert line in error
        assert error.count("\n") == 1
    assert not new.exists()
