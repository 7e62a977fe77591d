"""Write a data file for `opd run` from files of a published data set.

python tools/prepare_data.py NAME FILE... -o OUT.jsonl [--form FORM] [--min-difficulty LEAST]
    [--exclude FILE ...]

NAME is deepmath, math, math500, gsm8k, aime24, aime25, amc23 or dapo; FILE is what its authors
publish (parquet, JSONL, or a directory of the library datasets), which you have downloaded.
Repeated problems are written once, those with contradicting answers not at all. --min-difficulty
leaves out what is easier (DeepMath's difficulty, MATH's level) or of unknown difficulty. --exclude
names data files, such as those of data.heldout, none of whose problems are written. Every row has
id, prompt, answer and problem.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from data_recipes import FORMS, IDS, RECIPES, NoProblem, Recipe, Row, bare, key_of, own_id

from megatron_opd.data.chats import chat_text
from megatron_opd.data.faults import Fault, Unusable
from megatron_opd.data.files import located_rows
from megatron_opd.data.lines import Located
from megatron_opd.data.messages import read_chat

PROMPTS = ("problem", "prompt")
CONTRADICTING = "with contradicting answers"


@dataclass
class Prepared:
    """Rows by the key of their problem, None for contradictions, and what became of the others.

    easy: why a problem is not written all the same, and where it stands.
    """

    easy: dict[str, tuple[str, str]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, row: dict[str, Any], where: str, easy: str | None) -> None:
        """Take a problem that is new; a contradiction takes out the one before it too.

        easy: why a problem that is new is not written, which its later rows can still contradict.
        """
        key = key_of(row["problem"])
        if key not in self.rows:
            self.rows[key] = row
            if easy:
                self.easy[key] = easy, where
        elif (held := self.rows[key]) is not None and held["answer"] == row["answer"]:
            self.leave_out("repeated", where)
        else:
            self.leave_out(CONTRADICTING, where)
            self.left_out[CONTRADICTING] += held is not None
            self.rows[key] = None

    def leave_out(self, why: str, where: str) -> None:
        """Count a row that is not written."""
        self.left_out[why] += 1
        self.first.setdefault(why, where)

    def kept_rows(self) -> list[dict[str, Any]]:
        """What is written, in order, once the rest is counted."""
        for key, (why, where) in self.easy.items():
            if self.rows[key] is not None:
                self.leave_out(why, where)
        return [row for key, row in self.rows.items() if row is not None and key not in self.easy]


def fail(why: str) -> NoReturn:
    """End with one line for the user."""
    print(f"error: {why}", file=sys.stderr)
    raise SystemExit(2)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[Located | Fault]:
    """The rows of a file; one that cannot be read ends the program."""
    try:
        yield from located_rows(path, columns, ())
    except ValueError as error:
        fail(str(error))


def excluded(paths: Sequence[Path]) -> set[str]:
    """The keys of the problems of other data files, by their column problem, else prompt."""
    found: set[str] = set()
    for path in paths:
        rows = [row for row in rows_of(path, PROMPTS) if not isinstance(row, Fault)]
        if not rows:
            fail(f"--exclude {path} holds no rows")
        for where, row in rows:
            column = next((name for name in PROMPTS if row.get(name) is not None), PROMPTS[-1])
            try:
                found.add(key_of(bare(chat_text(read_chat(row, column)))))
            except Unusable as error:
                fail(f"--exclude {error.at(where)}")
    return found


def too_easy(recipe: Recipe, row: Row, least: float | None) -> str | None:
    """Why a row is not as hard as --min-difficulty wants, if it is not."""
    if least is None or recipe.difficulty is None:
        return None
    found = recipe.difficulty(row)
    if found is None:
        return "of unknown difficulty"
    return f"below --min-difficulty {least:g}" if found < least else None


def prepare(
    name: str, paths: Sequence[Path], form: str, without: set[str], least: float | None
) -> Prepared:
    """Every problem of the files once, but for those that are left out.

    least: the difficulty below which a problem is left out; None for every problem.
    """
    recipe, found = RECIPES[name], Prepared()
    for path in paths:
        for located in rows_of(path, columns_of(recipe)):
            if isinstance(located, Fault):
                found.leave_out(located.cause, str(located))
                continue
            where, row = located
            try:
                problem, answer = recipe.read(row)
            except NoProblem as error:
                found.leave_out("no problem with an answer", f"{where}: {error}")
                continue
            if key_of(problem) in without:
                found.leave_out("excluded", where)
                continue
            written = {
                "id": own_id(row) or f"{name}-{len(found.rows) + 1}",
                "prompt": FORMS[form](problem),
                "answer": answer,
                "problem": problem,
                "source": name,
            }
            kept = {key: row[key] for key in recipe.kept if row.get(key) is not None}
            found.add(written | kept, where, too_easy(recipe, row, least))
    return found


def columns_of(recipe: Recipe) -> tuple[str, ...]:
    """What is read of a table; a JSONL row is read whole."""
    answers = ("answer", "Answer", "final_answer", "solution", "Solution", "reward_model")
    return tuple(dict.fromkeys((*recipe.problem, *answers, *IDS, "extra_info", *recipe.kept)))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows; the file appears when it is whole."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(part, path)


def arguments_of(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="OUT.jsonl")
    parser.add_argument("--form", choices=sorted(FORMS), default="boxed")
    parser.add_argument("--min-difficulty", type=float, metavar="LEAST")
    parser.add_argument("--exclude", nargs="+", default=[], type=Path, metavar="FILE")
    return parser.parse_args(words)


def main() -> int:
    """Entry point."""
    arguments = arguments_of(sys.argv[1:])
    out: Path = arguments.output
    if out.suffix != ".jsonl" or out.exists() or not out.absolute().parent.is_dir():
        fail(f"-o must name a new .jsonl file in a directory that exists, got {out}")
    least: float | None = arguments.min_difficulty
    if least is not None and math.isnan(least):
        fail("--min-difficulty must be a number, got nan")
    if least is not None and RECIPES[arguments.name].difficulty is None:
        rated = ", ".join(name for name, recipe in RECIPES.items() if recipe.difficulty)
        fail(f"--min-difficulty needs a set with a difficulty ({rated}), got {arguments.name}")
    without = excluded(arguments.exclude)
    found = prepare(arguments.name, arguments.files, arguments.form, without, least)
    rows = found.kept_rows()
    for why, count in found.left_out.items():
        print(f"left out: {count} {why}, first {found.first[why]}")
    if not rows:
        counts = ", ".join(f"{count} {why}" for why, count in found.left_out.items()) or "no rows"
        fail(f"no problem of {', '.join(map(str, arguments.files))} can be written: {counts}")
    write(out, rows)
    print(f"{out}: {len(rows)} problems")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
