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


def told_in_one_line(ended: SystemExit, capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert ended.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


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


def math_row(problem: str, level: str | None, answer: str = "1") -> dict[str, Any]:
    solution = f"First \\boxed{{0}}, so $x = \\boxed{{{answer}}}$."
    return {"problem": problem, "level": level, "type": "Algebra", "solution": solution}


def test_math_and_math500(tmp_path: Path):
    row = math_row("What is $x$?", "Level 5", "\\frac{1}{\\sqrt{2}}")
    (found,) = prepared("math", tmp_path / "math.jsonl", table(tmp_path / "a.parquet", row))
    assert found == {
        "id": "math-1",
        "prompt": f"What is $x$?{BOXED}",
        "answer": "\\frac{1}{\\sqrt{2}}",
        "problem": "What is $x$?",
        "source": "math",
        "level": "Level 5",
        "type": "Algebra",
    }
    row = {
        "problem": "How many?",
        "solution": "So \\boxed{4}, or 2 + 2.",
        "answer": "3 + 1",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    }
    (found,) = prepared("math500", tmp_path / "500.jsonl", table(tmp_path / "b.parquet", row))
    assert (found["id"], found["answer"]) == ("test/precalculus/807.json", "3 + 1")
    assert (found["level"], found["subject"]) == (2, "Precalculus")


@pytest.mark.parametrize("write", [jsonl, table])
def test_levels_from_3_of_math(tmp_path: Path, capsys, write):
    levels = ["Level 1", "Level 2", "Level 3", "Level 4", "Level 5", "Level ?", None, "Level 6"]
    rows = [math_row(f"P{place}", level) for place, level in enumerate(levels, 1)]
    path = write(tmp_path / ("a.jsonl" if write is jsonl else "a.parquet"), *rows)
    found = prepared("math", tmp_path / "o.jsonl", path, "--min-difficulty", "3")
    assert [row["level"] for row in found] == ["Level 3", "Level 4", "Level 5"]
    said = capsys.readouterr().out
    place = f"{path}:" if write is jsonl else f"{path} row "
    assert f"left out: 2 below --min-difficulty 3, first {place}1\n" in said
    assert f"left out: 3 of unknown difficulty, first {place}6\n" in said
    # every problem has the same id without the option, which asks nothing of the levels
    whole = prepared("math", tmp_path / "all.jsonl", path)
    assert len(whole) == 8
    assert all(row in whole for row in found)


def test_difficulties_from_6_of_deepmath(tmp_path: Path, capsys):
    difficulties = [5.999, 6.0, 8.5, None, float("nan"), -1.0]
    rows = [
        {"question": f"Q{place}", "final_answer": "1", "difficulty": value, "topic": "t"}
        for place, value in enumerate(difficulties)
    ]
    path = table(tmp_path / "a.parquet", *rows)
    found = prepared("deepmath", tmp_path / "o.jsonl", path, "--min-difficulty", "6")
    assert [row["difficulty"] for row in found] == [6.0, 8.5]
    said = capsys.readouterr().out
    assert "left out: 2 below --min-difficulty 6" in said
    assert "left out: 2 of unknown difficulty" in said


def test_numbers_as_levels_of_math500(tmp_path: Path):
    rows = [
        {"problem": f"P{level!r}", "answer": "1", "level": level}
        for level in (True, *range(7), 4.0)
    ]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    found = prepared("math500", tmp_path / "o.jsonl", path, "--min-difficulty", "4")
    assert [row["level"] for row in found] == [4, 5, 4.0]


def test_what_is_too_easy_still_contradicts(tmp_path: Path, capsys):
    rows = [
        math_row("A", "Level 1", "1"),
        math_row("A", "Level 5", "2"),
        math_row("B", "Level 5", "1"),
        math_row("B", "Level 1", "2"),
        math_row("C", "Level 1", "1"),
        math_row("C", "Level 1", "1"),
        math_row("D", "Level 5", "1"),
    ]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    found = prepared("math", tmp_path / "o.jsonl", path, "--min-difficulty", "3")
    assert [row["problem"] for row in found] == ["D"]
    said = capsys.readouterr().out
    assert "left out: 4 with contradicting answers" in said
    assert "left out: 1 repeated" in said
    assert f"left out: 1 below --min-difficulty 3, first {path}:5\n" in said


def test_a_difficulty_that_leaves_nothing_or_is_not_there_is_one_line(tmp_path: Path, capsys):
    unboxed = {"problem": "P", "level": "Level 5", "type": "Algebra", "solution": "so 4"}
    path = jsonl(tmp_path / "a.jsonl", math_row("A", "Level 5"), math_row("B", "Level ?"), unboxed)
    new = tmp_path / "o.jsonl"
    nothing = (
        f"no problem of {path} can be written: 1 no problem with an answer, "
        "1 below --min-difficulty 6, 1 of unknown difficulty"
    )
    for name, least, line in (
        ("math", "6", nothing),
        ("math", "nan", "--min-difficulty must be a number, got nan"),
        ("gsm8k", "3", "needs a set with a difficulty (deepmath, math, math500), got gsm8k"),
    ):
        with pytest.raises(SystemExit) as caught:
            prepared(name, new, path, "--min-difficulty", least)
        told_in_one_line(caught.value, capsys, line)
    assert not new.exists()


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
        ("math", {"problem": "q", "solution": "no box"}, "the solution has no \\boxed{...}"),
        ("math", {"problem": "q", "answer": "1"}, "no column solution"),
        ("math500", {"problem": "q", "solution": "\\boxed{1}"}, "no column answer"),
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
        ([empty, "-o", new], "empty.jsonl can be written: no rows"),
        ([good, "-o", new, "--exclude", empty], "empty.jsonl holds no rows"),
        ([good, "-o", new, "--exclude", odd], "odd.jsonl:1: missing column 'prompt'"),
        ([tmp_path / "*.csv", "-o", new], "data file not found: no file fits"),
    ):
        with pytest.raises(SystemExit) as caught:
            exit_code("prepare_data", "gsm8k", *map(str, words))
        told_in_one_line(caught.value, capsys, line)
    assert not new.exists()
