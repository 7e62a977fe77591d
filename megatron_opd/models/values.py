"""Reads single values of config.json. Torch-free."""

from __future__ import annotations

from typing import Any

from megatron_opd.config.wording import shown

MAX_COUNT = 2**31 - 1
# Each layer and each expert of it is listed by name.
MAX_LAYERS, MAX_EXPERTS = 1024, 4096


def read_count(config: dict[str, Any], key: str, most: int = MAX_COUNT) -> int:
    """Return a whole number >= 1. KeyError: there is none; ValueError: it is no such number."""
    value = config[key]
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} must be an integer >= 1 and <= {most}, got {shown(value)}")
    return value


def read_number(config: dict[str, Any], key: str) -> int:
    """Return a number of layers, or 0. KeyError and ValueError as read_count."""
    value = config[key]
    if type(value) is not int or not 0 <= value <= MAX_LAYERS:
        raise ValueError(f"{key} must be an integer >= 0 and <= {MAX_LAYERS}, got {shown(value)}")
    return value


def read_positive(config: dict[str, Any], key: str, *, whole: bool = True) -> float:
    """Return a number > 0. KeyError and ValueError as read_count.

    whole: transformers takes one that is written without a point.
    """
    value = config[key]
    # float32 holds it, and so does its square root
    if type(value) not in ((int, float) if whole else (float,)) or not 0 < value < 1e30:
        raise ValueError(f"{key} must be a number > 0 and < 1e30, got {shown(value)}")
    return float(value)


def read_flag(config: dict[str, Any], key: str) -> bool:
    """Return true or false. KeyError and ValueError as read_count."""
    value = config[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {shown(value)}")
    return value
