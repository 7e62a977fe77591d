"""Section `environment`: what it takes, and what it says of the rest, in one line."""

import pytest
from pydantic import ValidationError

from megatron_opd.config.environment import (
    CalculatorConfig,
    EnvironmentConfig,
    GuessConfig,
    OwnEnvironmentConfig,
    PythonConfig,
    UserConfig,
)
from megatron_opd.config.problems import first_problem
from megatron_opd.config.section import Section


class Tree(Section):
    """A tree with the section."""

    environment: EnvironmentConfig | None = None


def read(section):
    return Tree.model_validate({"environment": section}).environment


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "calculator"}, CalculatorConfig),
        ({"type": "python", "program_timeout_s": 1}, PythonConfig),
        ({"type": "guess", "history": "branch", "max_sequences": 2}, GuessConfig),
        ({"type": "user", "teacher": "large", "opens": "user"}, UserConfig),
        ({"type": "mine.games:Chess", "arguments": {"level": 3}}, OwnEnvironmentConfig),
    ],
)
def test_what_it_takes(section, kind):
    assert isinstance(read(section), kind)
    assert read(section).max_turns == 8


def test_it_may_be_absent():
    assert Tree.model_validate({}).environment is None


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({}, "environment.type must be one of calculator, python, guess, user"),
        ({"type": "chess"}, "environment.type must be one of calculator, python, guess, user"),
        (
            {"type": "user", "tool_format": "glm"},
            "environment: tool_format has no effect with type: user",
        ),
        ({"type": "user", "memory_bytes": 5}, "environment: memory_bytes has no effect with type"),
        ({"type": "user", "stop": ""}, "environment.stop: string should have at least 1 character"),
        ({"type": "guess", "max_turn": 3}, "unknown key 'environment.max_turn'"),
        (
            {"type": "guess", "max_turns": 0},
            "environment.max_turns: input should be greater than 0",
        ),
        (
            {"type": "guess", "tool_format": "xml"},
            "environment.tool_format: input should be 'hermes'",
        ),
        (
            {"type": "guess", "timeout_s": 0},
            "environment.timeout_s: input should be greater than 0",
        ),
        (
            {"type": "guess", "max_tokens": 9, "max_turn_tokens": 10},
            "environment: max_turn_tokens must be at most max_tokens, which counts all turns of a "
            "sequence, got 10 and 9; raise max_tokens",
        ),
        (
            {"type": "guess", "max_sampled_tokens": 9, "max_turn_tokens": 10},
            "environment: max_turn_tokens must be at most max_sampled_tokens, which counts all "
            "turns, got 10 and 9; raise max_sampled_tokens",
        ),
        (
            {"type": "guess", "max_sequences": 3},
            "environment: max_sequences has no effect with history: append",
        ),
        (
            {"type": "guess", "low": 3, "high": 2},
            "environment: low must be <= high, got 3 and 2; swap them",
        ),
        (
            {"type": "python", "program_timeout_s": 60},
            "environment: program_timeout_s must be below timeout_s, or an endless program drops "
            "its trajectory, got 60 and 60; raise timeout_s",
        ),
        (
            {"type": "python", "program_memory_bytes": 2**33},
            "environment: program_memory_bytes must be at most memory_bytes",
        ),
        ({"type": "calculator", "arguments": {}}, "unknown key 'environment.arguments'"),
        (
            {"type": "guess", "columns": ["goal", "id", "goal"]},
            "environment.columns: must name each column once, got 'goal' twice",
        ),
        (
            {"type": "a:B", "arguments": {"x": float("nan")}},
            "environment.arguments: must hold text, numbers, true, false, lists and mappings",
        ),
    ],
)
def test_what_it_refuses(section, problem: str):
    with pytest.raises(ValidationError) as caught:
        read(section)
    found = first_problem(Tree, caught.value)
    assert found.startswith(problem)
    assert "\n" not in found
