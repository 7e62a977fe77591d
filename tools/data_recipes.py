"""How the rows of published data sets become problems with answers.

The columns are those of the files on the Hugging Face hub; where several copies of a set are in
use, all of their names are tried in turn.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_opd.data.tasks.answers import last_boxed

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
FORMS: Mapping[str, Callable[[str], str]] = {
    "boxed": lambda problem: f"{problem}{BOXED}",
    "answer_line": lambda problem: f"{DAPO_HEAD}{problem}{DAPO_TAIL}",
    "plain": lambda problem: problem,
}
"""How a prompt asks for its answer: in a box, in a last line as DAPO does, or not at all."""
SPACING = re.compile(r"\s|\$|\\[,;:! ]")
LEVEL = re.compile(r"(?:Level )?([1-5])(?:\.0)?")
Row = Mapping[str, Any]


class NoProblem(Exception):
    """A row that is no problem with an answer, and why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a data set keeps its problems and answers.

    answer: finds it in a row. kept: columns that are copied as they are. difficulty: finds how hard
    a row's problem is, None where the row does not say; None itself for a set that never says.
    """

    problem: tuple[str, ...]
    answer: Callable[[Row], str]
    kept: tuple[str, ...] = ()
    difficulty: Callable[[Row], float | None] | None = None

    def read(self, row: Row) -> tuple[str, str]:
        """The problem, without what asks for the answer's form, and the answer."""
        problem = bare(_content(_first(row, self.problem)))
        if not problem:
            raise NoProblem("the problem is empty")
        answer = self.answer(row).strip()
        if not answer:
            raise NoProblem("the answer is empty")
        return problem, answer


def bare(prompt: str) -> str:
    """A prompt without the words that ask for the answer's form."""
    text = prompt.strip().removesuffix(BOXED.strip()).strip()
    return text.removeprefix(DAPO_HEAD.strip()).removesuffix(DAPO_TAIL.strip()).strip()


def key_of(problem: str) -> str:
    """What two spellings of one problem share: case, blanks and TeX's spacing do not count."""
    return SPACING.sub("", unicodedata.normalize("NFKC", problem).casefold())


def boxed(text: str) -> str:
    r"""The content of the last \boxed{...} or \fbox{...} whose braces close."""
    found = last_boxed(text)
    if found is None:
        raise NoProblem("the solution has no \\boxed{...}")
    return found


def own_id(row: Row) -> str | None:
    """The row's own name: a column, or the index that verl keeps in extra_info."""
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, dict) else None
    own = next((row[key] for key in IDS if row.get(key) is not None), index)
    return None if own is None else str(own)


def _first(row: Row, names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise NoProblem(f"no column {' or '.join(names)}; the columns are {', '.join(sorted(row))}")


def _content(value: Any) -> str:
    """Text, or the text of a list of one message."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if not isinstance(value, str):
        raise NoProblem(f"the problem must be text or one message, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise NoProblem(f"the answer must be text or a number, got {type(value).__name__}")
    return str(value)


def _after_marks(row: Row) -> str:
    """GSM8K's: what follows the last ####, without thousands separators."""
    solution = _text(_first(row, ("answer",)))
    if "####" not in solution:
        raise NoProblem("the answer has no ####")
    return solution.rpartition("####")[2].strip().replace(",", "")


def _competition(row: Row) -> str:
    """The answer's own column, or the box of a solution."""
    if row.get("answer") is None and row.get("Answer") is None:
        return boxed(_text(_first(row, ("solution", "Solution"))))
    return _text(_first(row, ("answer", "Answer")))


def _aime(row: Row) -> str:
    """AIME's answers are 0..999, often with leading zeros."""
    answer = _competition(row).strip()
    if not (answer.isascii() and answer.isdigit() and int(answer) < 1000):
        raise NoProblem(f"an answer of AIME is a whole number 0..999, got {answer[:40]!r}")
    return str(int(answer))


def _dapo(row: Row) -> str:
    """The ground truth of verl's column reward_model, or the column of the processed copy."""
    judged = row.get("reward_model")
    if isinstance(judged, dict) and judged.get("ground_truth") is not None:
        return _text(judged["ground_truth"])
    return _text(_first(row, ("solution", "answer")))


def _rated(row: Row) -> float | None:
    """DeepMath's: a number of its own scale, in which harder is higher."""
    value = row.get("difficulty")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _level(row: Row) -> float | None:
    """MATH's levels 1 to 5, written "Level 5" by its authors and 5 in MATH-500."""
    match = LEVEL.fullmatch(str(row.get("level")))
    return float(match[1]) if match else None


PROBLEMS = ("problem", "Problem", "question", "Question")
IDS = ("id", "ID", "unique_id")
RECIPES: Mapping[str, Recipe] = {
    "deepmath": Recipe(
        ("question",),
        lambda row: _text(_first(row, ("final_answer",))),
        kept=("difficulty", "topic"),
        difficulty=_rated,
    ),
    "math": Recipe(
        ("problem",),
        lambda row: boxed(_text(_first(row, ("solution",)))),
        kept=("level", "type"),
        difficulty=_level,
    ),
    "math500": Recipe(
        ("problem",),
        lambda row: _text(_first(row, ("answer",))),
        kept=("level", "subject"),
        difficulty=_level,
    ),
    "gsm8k": Recipe(("question",), _after_marks),
    "aime24": Recipe(PROBLEMS, _aime),
    "aime25": Recipe(PROBLEMS, _aime),
    "amc23": Recipe(PROBLEMS, _competition),
    "dapo": Recipe(("prompt",), _dapo),
}
"""By the name that tools/prepare_data.py takes."""
