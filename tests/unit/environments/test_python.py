"""The Python tool returns what a program prints, shut off from the machine."""

import asyncio

import pytest

from megatron_opd.environments.calls import Reply, ToolCall
from megatron_opd.environments.python import PythonEnvironment
from tests.support.features import needs

pytestmark = needs("isolation")


def said(code: str, **options) -> str:
    call = ToolCall("call00000", "python", {"code": code})
    environment = PythonEnvironment(**options)
    (message,) = asyncio.run(environment.step(Reply(0, "", calls=(call,))))
    assert message["role"] == "tool"
    return message["content"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)\nprint('é🙂')", "42\né🙂"),
        ("x = 1", "[no output]"),
        ("import sys; sys.exit(3)", "[exit code 3]"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("1 / 0", "ZeroDivisionError: division by zero\n[exit code 1]"),
        ("print('before'); (", "SyntaxError"),
        ("if __name__ == '__main__': print('main')", "main"),
    ],
)
def test_what_a_program_prints_is_returned(code: str, text: str):
    assert text in said(code)


def test_a_traceback_names_the_students_own_line():
    assert 'File "program.py", line 2' in said("a = 1\nb = a / 0")


def test_only_the_end_of_a_long_output_is_returned():
    assert (
        said("print('a' * 50 + 'end')", output_characters=10)
        == "[43 characters left out]\naaaaaaaend"
    )


def test_a_program_that_does_not_end_is_ended():
    assert (
        said("print('on', flush=True)\nwhile True: pass", timeout_s=1.0) == "on\n[ended after 1 s]"
    )


def test_a_program_that_prints_too_much_is_ended():
    found = said("while True: print('a' * 10**6)", output_characters=3)
    assert found.endswith("characters left out]\naaa\n[ended: it printed too much]")


def test_nothing_is_left_of_the_call_before():
    assert "NameError" in said("print(x)")
    assert said("x = 1") == "[no output]"
    assert "NameError" in said("print(x)")
