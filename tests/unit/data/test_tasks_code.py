"""Programs judged by their tests; tests/unit/data/verifiers/sandbox tests the sandbox."""

import json

import pytest

from megatron_opd.data.tasks.code import last_block, parse_tests, verify
from tests.support.features import needs
from tests.support.programs import ADDS, ASSERTS

NEVER_S = 300.0
SUMS = "```py\nprint(sum(map(int, input().split())))\n```"
PAIRS = json.dumps({"inputs": ["1 2\n", "4 5 6\n"], "outputs": ["3\n", "15"]})


@needs("isolation")
@pytest.mark.parametrize(
    ("response", "answer", "reward", "expected"),
    [
        (ADDS, ASSERTS, "all", 1),
        (ADDS, "assert add(2, 2) == 4", "all", 1),
        (ADDS.replace("a + b", "a - b"), ASSERTS, "all", 0),
        (ADDS.replace("a + b", "abs(a + b) + (a < 0)"), ASSERTS, "all", 0),
        (ADDS.replace("a + b", "abs(a + b) + (a < 0)"), ASSERTS, "share", 0.5),
        (ADDS.replace("a + b", "a +"), ASSERTS, "share", 0),
        ("no code at all", ASSERTS, "all", 0),
        ("", ASSERTS, "all", 0),
        ("print('noise')\n" + ADDS[ADDS.index("def") : ADDS.rindex("```")], ASSERTS, "all", 1),
        (SUMS, PAIRS, "all", 1),
        (SUMS.replace("sum", "max"), PAIRS, "all", 0),
        ("print(3)", PAIRS, "all", 0),
        ("print(3)", PAIRS, "share", 0.5),
        ("print(3, '   ')\nprint()", PAIRS, "share", 0.5),
        ("print(3); raise SystemExit(1)", PAIRS, "share", 0),
    ],
)
def test_code_is_right_if_its_tests_pass(response, answer, reward, expected):
    assert verify(response, answer, timeout_s=NEVER_S, reward=reward) == expected


@needs("isolation")
@pytest.mark.parametrize(
    "response",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import os; os.write(1, b'2'); os._exit(0)",
        "import os; os.write(3, b'2'); os._exit(0)",
        "print(2); print('passed 2')",
        "import os\nos.closerange(0, 32)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import sys; sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
        "held = []\nwhile True: held.append(bytearray(2**24))",
        "while True: print('x' * 1000)",
        "while True: pass",
        "import time; time.sleep(3600)",
    ],
)
def test_a_program_that_ends_early_or_never_passes_nothing(response):
    given = {"timeout_s": 1.5, "cpu_s": 1, "reward": "share"}
    assert verify(response, ASSERTS, **given) == 0
    assert verify(response, PAIRS, **given) == 0


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("assert f() == 1", ["assert f() == 1"]),
        ('{"asserts": ["a", "b"]}', ["a", "b"]),
        ('{"inputs": ["1"], "outputs": ["2"]}', (("1", "2"),)),
        ("[1, 2]", ["[1, 2]"]),
    ],
)
def test_the_forms_of_tests(answer, tests):
    assert parse_tests(answer) == tests


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        '{"asserts": []}',
        '{"asserts": "a"}',
        '{"asserts": [1]}',
        '{"inputs": ["1"]}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["1", "2"], "outputs": ["1"]}',
        '{"asserts": ["a"], "inputs": ["1"], "outputs": ["2"]}',
    ],
)
def test_an_answer_without_usable_tests_is_refused(answer):
    with pytest.raises(ValueError, match="the answer of a code row must be"):
        parse_tests(answer)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "\nx = 1\n"),
        ("```\nx = 1\n```\n\n```\nx = 2\n```\nso", "\nx = 2\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "\nx = 2"),
        ("use `x` or ```x``` inline", "use `x` or ```x``` inline"),
        ("  ```py\n  x = 1\n  ```", "\n  x = 1\n"),
    ],
)
def test_the_last_fenced_block_is_the_code(response, code):
    assert last_block(response) == code
