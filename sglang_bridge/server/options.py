"""Reads SGLang's command-line options from a table instead of from SGLang.

SGLang's own parser takes any unambiguous beginning of an option for it, reads more arguments from a
file (--config), and needs SGLang to be installed. This one takes whole names alone, of the
supported version.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

TABLE = Path(__file__).parent / "options.txt"
TYPES = {"str": str, "int": int, "float": float}


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@cache
def names_by_option() -> dict[str, str]:
    """Returns {option as written: the name of the setting it makes}."""
    return {option: name for name, _, options in _rows() for option in options}


def given(arguments: Sequence[str]) -> dict[str, str]:
    """Returns {option as written: the name of the setting it makes} of a command line.

    Raises ValueError for what is not an option of SGLang, is abbreviated, or lacks its value.
    """
    known = names_by_option()
    _, unknown = _parser().parse_known_args(list(arguments))
    unknown += [argument for argument in arguments if argument == "--"]
    if unknown:
        # without its value, which may be a secret
        raise ValueError(
            f"{unknown[0].partition('=')[0]!r} is not an option of SGLang "
            "(abbreviations are not accepted)"
        )
    written = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return {option: known[option] for option in written if option in known}


def _rows() -> list[tuple[str, str, list[str]]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return [(name, kind, options) for name, kind, *options in rows]


@cache
def _parser() -> _Parser:
    parser = _Parser(prog="extra_args", allow_abbrev=False, add_help=False)
    for name, kind, options in _rows():
        if kind == "flag":
            parser.add_argument(*options, dest=name, action="store_true")
            continue
        many = kind[0] if kind[0] in "?*+" else None
        parser.add_argument(*options, dest=name, nargs=many, type=TYPES[kind.lstrip("?*+")])
    return parser
