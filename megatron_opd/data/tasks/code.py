r"""Verifies Python code by running it in the sandbox on the row's tests.

The answer column holds the tests of a row, as JSON text, in one of two forms:
    {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}   a run each: what is read and printed
    {"asserts": ["assert add(1, 2) == 3", ...]}          statements after the response's code
Text that is no JSON object is one such statement, and a list of texts several. The code is the last
fenced block of the response (```python or any other), or all of it without one.

A program that fails, hangs, prints too much or reaches a limit is wrong; only a row without usable
tests and a kernel that denies isolation are failures of the verifier.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

from megatron_opd.data.tasks.base import Task
from megatron_opd.data.verifiers.sandbox.run import SandboxLimits, SandboxOutcome, run_program

_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
# The response may print, exit and close what it wants: what counts is the last line that follows
# the secret word, on a descriptor that it was not told.
_ASSERTS = """
import json, os
_given = json.loads({given!r})
def _judge(source, tests, word):
    out = os.dup(1)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    scope, passed = {{"__name__": "__main__"}}, 0
    try:
        exec(compile(source, "response.py", "exec"), scope)
        for test in tests:
            try:
                exec(compile(test, "test.py", "exec"), scope)
                passed += 1
            except BaseException:
                pass
    except BaseException:
        pass
    os.write(out, f"{{word}} {{passed}}".encode())
    os._exit(0)
_judge(**_given)
"""


def verify(
    response: str,
    answer: str,
    *,
    timeout_s: float = 8.0,
    reward: Literal["all", "share"] = "all",
    **limits: int,
) -> float:
    """Return 1 if the response's code passes every test; reward "share": the share that it passes.

    timeout_s: of all tests together. limits: the fields of sandbox.run.Limits. Raises ValueError
    for an answer without tests, SandboxError where the kernel denies isolation.
    """
    deadline_s = time.monotonic() + timeout_s
    tests, bounds = parse_tests(answer), SandboxLimits(**limits)
    code = last_block(response)
    if isinstance(tests, list):
        passed, total = _passed_asserts(code, tests, bounds, timeout_s), len(tests)
    else:
        passed, total = 0, len(tests)
        for number, (stdin, expected) in enumerate(tests):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or (reward == "all" and passed < number):
                break
            passed += _prints(run_program(code, stdin, bounds, left_s), expected)
    return passed / total if reward == "share" else float(passed == total)


def joined(answers: Sequence[str]) -> str:
    """Return the tests of a row that has a list of statements. ValueError: it holds other tests."""
    tests = [parse_tests(answer) for answer in answers]
    if not all(isinstance(each, list) for each in tests):
        raise ValueError("a list of tests must hold statements; inputs and outputs are one text")
    return json.dumps({"asserts": [statement for each in tests for statement in each]})


def parse_tests(answer: str) -> list[str] | tuple[tuple[str, str], ...]:
    """Return a row's statements, or its pairs of input and output. ValueError: there are none."""
    try:
        found: Any = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return [answer]
    tests = cast(dict[str, Any], found)
    if set(tests) == {"asserts"} and _are_texts(tests["asserts"]):
        return list(tests["asserts"])
    paired = set(tests) == {"inputs", "outputs"} and all(map(_are_texts, tests.values()))
    if paired and len(tests["inputs"]) == len(tests["outputs"]):
        return tuple(zip(tests["inputs"], tests["outputs"], strict=True))
    raise ValueError(
        'the answer of a code row must be {"asserts": [TEXT, ...]}, or {"inputs": [TEXT, ...], '
        f'"outputs": [TEXT, ...]}} of one length, got keys {sorted(tests)}'
    )


def last_block(response: str) -> str:
    """Return the content of the last fenced block, one that never closes too; else all of it."""
    fences = list(_FENCE.finditer(response))
    if not fences:
        return response
    if len(fences) % 2:
        return response[fences[-1].end() :]
    return response[fences[-2].end() : fences[-1].start()]


def _are_texts(value: Any) -> bool:
    is_list = isinstance(value, list) and len(cast(Sequence[Any], value)) > 0
    return is_list and all(isinstance(each, str) for each in value)


def _passed_asserts(
    code: str, tests: Sequence[str], limits: SandboxLimits, timeout_s: float
) -> int:
    word = secrets.token_hex(16)
    given = json.dumps({"source": code, "tests": tests, "word": word})
    outcome = run_program(_ASSERTS.format(given=given), "", limits, timeout_s)
    said = outcome.output.decode(errors="replace").rpartition(word)
    passed = said[2].strip()
    if outcome.ended != "exited" or said[1] == "" or not passed.isdecimal():
        return 0
    return min(int(passed), len(tests))


def _prints(outcome: SandboxOutcome, expected: str) -> bool:
    """Tell whether a program ended well and printed what was expected, but for trailing blanks."""
    if outcome.ended != "exited" or outcome.code != 0:
        return False
    return _lines(outcome.output.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


CODE = Task("code", verify=verify, joined=joined)
