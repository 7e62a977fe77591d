r"""Finds the final answer of a response, and decides when two answers are written alike.

Rules, in the order in which they are applied (docs/data.md shows each with examples). No rule
computes: 1/2 and 0.5 are two answers.

Where the answer of a response is (`final_answer`), the first that is found:
1. the content of the last `\boxed{...}` (or `\fbox{...}`) whose braces close; nested braces count;
2. the text after the last `####` on its line;
3. of the last line that is not blank, what follows its last "answer is" or "answer:", else all
   of it: a line before it, such as "I think the answer is 5", counts for nothing.
In an `answer` column rules 1 and 2 choose, as some data sets write solutions there; else all of it
is the answer.

How it is written (`normalised`), applied to both sides:
1. white space runs become one space, outer white space goes;
2. markdown around the whole goes: `**x**`, `*x*`, `__x__`, `_x_`, backticks;
3. TeX around the whole goes: `$x$`, `$$x$$`, `\(x\)`, `\[x\]`, `\boxed{x}`, `\text{x}`;
4. one trailing full stop, comma, colon or semicolon goes;
5. thousands separators of a plain number go: `1,234,567` and TeX's `1{,}234`, in groups of three;
   a leading `+` goes too.
Rules 2 to 4 repeat until nothing changes.

Every rule looks at a text once from left to right, so that a hostile text of any length costs
time proportional to it.
"""

from __future__ import annotations

import re

_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(r"\+[0-9]+(?:\.[0-9]+)?")
_PAIRS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`")),
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
)
_COMMANDS = ("\\boxed{", "\\fbox{", "\\text{", "\\mathrm{", "\\textbf{", "\\mathbf{")
_BOXES = re.compile(r"\\(?:boxed|fbox)[ ]?\{")
_STATED = re.compile(r"answer(?: is|:)", re.IGNORECASE)
_ENDS = ".,:;"
# Wrappers inside wrappers beyond this are no answer; it bounds the work on a hostile one.
_MAX_WRAPPERS = 16


def final_answer(response: str) -> str:
    """Return the final answer of a response as it is written; "" when there is none."""
    marked = marked_answer(response)
    if marked is not None:
        return marked
    lines = response.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    stated = list(_STATED.finditer(last))
    if not stated:
        return last
    rest = last[stated[-1].end() :].strip()
    if rest.count("**") % 2:  # half of a pair: "**Answer:** 42", "**The answer is 42.**"
        rest = (rest.removeprefix("**") if rest[:2] == "**" else rest.removesuffix("**")).strip()
    return rest.removeprefix(":").strip() or last


def marked_answer(text: str) -> str | None:
    """Return what the last box or, without one, the last `####` holds; None without either."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for line in reversed(text.splitlines()):
        _, mark, rest = line.rpartition("####")
        if mark and rest.strip():
            return rest.strip()
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces close; None without one.

    A brace after a backslash is text, as in TeX.
    """
    starts = {match.end() - 1 for match in _BOXES.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    best: tuple[int, int] | None = None
    position = min(starts)
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == "{":
            opened.append(position)
        elif character == "}" and opened:
            start = opened.pop()
            if start in starts and (best is None or start > best[0]):
                best = (start, position)
        position += 1
    return None if best is None else text[best[0] + 1 : best[1]]


def normalised(answer: str) -> str:
    """Return the answer normalised by the rules of the module."""
    text = " ".join(answer.split())
    for _ in range(_MAX_WRAPPERS):
        shorter = _unwrapped(text)
        if shorter[-1:] in _ENDS:
            shorter = shorter[:-1].rstrip()
        if shorter == text:
            break
        text = shorter
    plain = text.replace("{,}", ",")
    if _GROUPED.fullmatch(plain):
        text = plain.replace(",", "")
    return text.removeprefix("+") if _PLAIN.fullmatch(text) else text


def _unwrapped(text: str) -> str:
    """Return `text` without one pair of marks or one command around all of it."""
    for opening, closing in _PAIRS:
        inner = text[len(opening) : len(text) - len(closing)]
        long_enough = len(text) > len(opening) + len(closing)
        wrapped = text.startswith(opening) and text.endswith(closing)
        if long_enough and wrapped and closing not in inner:
            return inner.strip()
    for command in _COMMANDS:
        if text.startswith(command) and text.endswith("}"):
            inner = text[len(command) : -1]
            if _balanced(inner):
                return inner.strip()
    return text


def _balanced(text: str) -> bool:
    """Return whether every brace of `text` closes inside it."""
    depth, position = 0, 0
    while position < len(text):
        character = text[position]
        position += 2 if character == "\\" else 1
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0
