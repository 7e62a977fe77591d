"""Gives the student a calculator: one tool, `calculate`.

Invariant: an expression of any kind is computed exactly in bounded time, or refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megatron_opd.environments.tools import CallableTool, ToolEnvironment, ToolError

MOST_CHARACTERS, MOST_BITS, MOST_EXPONENT = 256, 512, 64
DIGITS = 12
"""Digits behind the point of a result that is no whole number."""
_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "such as (2 + 3) * 4 / 5"}},
    "required": ["expression"],
    "additionalProperties": False,
}


class CalculatorEnvironment(ToolEnvironment):
    """Gives one tool, which computes expressions of numbers, + - * / // % ** and parentheses."""

    def __init__(self) -> None:
        what = "Computes an arithmetic expression exactly."
        super().__init__([CallableTool("calculate", what, _PARAMETERS, _calculate)])


async def _calculate(arguments: Mapping[str, Any]) -> str:
    return calculated(arguments["expression"])


def calculated(expression: str) -> str:
    """Return the value of an expression. ToolError: it has none."""
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"an expression must have at most {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is no arithmetic expression") from None
    scaled = round(value * 10**DIGITS)
    whole, rest = divmod(abs(scaled), 10**DIGITS)
    digits = f"{whole}.{rest:0{DIGITS}d}".rstrip("0").rstrip(".")
    return f"-{digits}" if scaled < 0 else digits


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1 or abs(right) > MOST_EXPONENT:
                raise ToolError(f"an exponent must be a whole number up to {MOST_EXPONENT}")
            return _bounded(left ** int(right))
        if type(node.op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    raise ToolError("only numbers, + - * / // % ** and parentheses can be computed")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ToolError("the number is too large")
    return value
