"""The calculator computes exactly, in bounded time, and refuses everything else in words."""

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opd.data.chats import SYSTEM, USER, ChatMessage
from megatron_opd.environments.calculator import CalculatorEnvironment, calculated
from megatron_opd.environments.calls import Reply, ToolCall
from megatron_opd.environments.protocol import Environment, EnvironmentRow, TrajectoryEnd
from megatron_opd.environments.tools import ToolError

NUMBERS = st.integers(-999, 999)


@given(a=NUMBERS, b=NUMBERS, c=NUMBERS, one=st.sampled_from("+-*"), other=st.sampled_from("+-*"))
def test_it_computes_what_python_computes(a: int, b: int, c: int, one: str, other: str):
    expression = f"{a} {one} ({b} {other} {c})"
    assert calculated(expression) == str(eval(expression))


@given(a=NUMBERS, b=NUMBERS.filter(bool))
def test_it_divides_exactly(a: int, b: int):
    found = Fraction(calculated(f"({a}) / ({b})"))
    assert abs(found - Fraction(a, b)) <= Fraction(1, 2 * 10**12)
    assert calculated(f"({a}) / ({b}) * ({b})") == str(a)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("2 ** -2", "0.25"),
        ("7 // 2 + 7 % 2", "4"),
        (" -(+3) ", "-3"),
        ("1e3", "1000"),
        ("1 / 3", "0.333333333333"),
        ("(0 - 8) ** 3", "-512"),
    ],
)
def test_its_forms(expression: str, value: str):
    assert calculated(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 65", "an exponent must be a whole number up to 64"),
        ("2 ** 0.5", "an exponent must be a whole number up to 64"),
        ("9 ** 64 ** 1 * 9 ** 64 * 9 ** 64", "the number is too large"),
        ("1e999", "this is no arithmetic expression"),
        ("9" * 257, "at most 256 characters"),
        ("((((((((((((((((" * 16, "this is no arithmetic expression"),
        ("", "this is no arithmetic expression"),
        ("2 +", "this is no arithmetic expression"),
        ("\0", "this is no arithmetic expression"),
        ("a", "only numbers"),
        ("True", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("2 << 9", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("[1]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1j", "only numbers"),
    ],
)
def test_what_it_refuses(expression: str, why: str):
    with pytest.raises(ToolError, match=why):
        calculated(expression)


@given(text=st.text("0123456789+-*/%().^e _", max_size=40))
def test_any_expression_is_computed_or_refused(text: str):
    try:
        assert Fraction(calculated(text)) is not None
    except ToolError:
        return


def said(*calls: ToolCall) -> object:
    environment = CalculatorEnvironment()
    assert isinstance(environment, Environment)
    return asyncio.run(environment.step(Reply(0, "hm", calls=calls)))


def test_calls_are_answered_in_their_order():
    good = ToolCall("call00000", "calculate", {"expression": "2 + 3"})
    bad = ToolCall("call00001", "calculate", {"expression": "2 +"})
    none = ToolCall("call00002", "", {}, "the call must be JSON")
    assert said(good, bad, none) == [
        {"role": "tool", "tool_call_id": "call00000", "name": "calculate", "content": "5"},
        {
            "role": "tool",
            "tool_call_id": "call00001",
            "name": "calculate",
            "content": "error: this is no arithmetic expression",
        },
        {
            "role": "tool",
            "tool_call_id": "call00002",
            "name": "unknown",
            "content": "error: the call must be JSON",
        },
    ]


def test_a_turn_without_a_call_is_the_answer_which_the_verifier_judges():
    assert said() == TrajectoryEnd(None)


def test_it_begins_with_the_rows_prompt():
    chat = (ChatMessage(SYSTEM, "Be brief."), ChatMessage(USER, "2 + 3?", {"name": "Ada"}))
    start = CalculatorEnvironment().start
    assert asyncio.run(start(EnvironmentRow("2 + 3?"))) == "2 + 3?"
    assert asyncio.run(start(EnvironmentRow(chat))) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?", "name": "Ada"},
    ]
