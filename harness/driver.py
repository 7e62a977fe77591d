"""Runs checks, studies and benchmarks by name, and prints one JSON object for each.

    python -m checks | studies | benchmarks [NAME ...] [OPTIONS of the one NAME]

A case is a module or package of one of the three with a function `measure`, which returns figures;
options go to it as they are. Without a name the cases are listed. Exit code 1: a case `failed`;
2: there is no such case here, or it takes no such options.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.header import header
from harness.tree import ROOT, DirtyTree

PACKAGES = ("checks", "studies", "benchmarks")


def cases(package: str) -> dict[str, Path]:
    """{name: the file that has its `measure`} of the cases of a package, by name."""
    files = [*(ROOT / package).glob("*.py"), *(ROOT / package).glob("*/__init__.py")]
    return {
        file.parent.name if file.stem == "__init__" else file.stem: file
        for file in sorted(files, key=lambda file: file.relative_to(ROOT).with_suffix("").parts)
        if re.search(r"^def measure\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def table(package: str) -> dict[str, str]:
    """{name: the first line of its docstring} of the cases of a package."""
    texts = {
        name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        for name, file in cases(package).items()
    }
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def main(package: str, arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m PACKAGE`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", add_help=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(cases(package)))
    parser.add_argument("-h", "--help", action="store_true", help="of this, or of the one NAME")
    parsed, options = parser.parse_known_args(arguments)
    for name in parsed.names:
        homes = [each for each in PACKAGES if name in cases(each)]
        if not homes:
            parser.error(f"unknown name {name!r}; choices: {', '.join(cases(package))}")
        if package not in homes:
            command = " ".join(["python -m", homes[0], name, *options])
            print(f"{name} is one of the {homes[0]}: {command}", file=sys.stderr)
            return 2
    if parsed.help:
        show_help(package, parsed.names, parser)
        return 0
    if options and len(parsed.names) != 1:
        parser.error(f"options {options} need one NAME that takes them")
    if not parsed.names:
        for name, line in table(package).items():
            print(f"{name:20} {line}")
    failed = [name for name in parsed.names if not succeeds(package, name, options, parser)]
    return int(bool(failed))


def show_help(package: str, names: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print how to call this program; of cases, what each measures and which options it takes."""
    if not names:
        parser.print_help()
    for name in names:
        case = importlib.import_module(f"{package}.{name}")
        print(inspect.getdoc(case))
        if "options" in inspect.signature(case.measure).parameters:
            with contextlib.suppress(SystemExit):  # argparse ends where it has shown help
                case.measure(["--help"])


def succeeds(
    package: str, name: str, options: Sequence[str], parser: argparse.ArgumentParser
) -> bool:
    """Run a case and print its record; returns whether it did not fail."""
    measure = importlib.import_module(f"{package}.{name}").measure
    if options and "options" not in inspect.signature(measure).parameters:
        parser.error(f"unknown options {options}: {name} takes none")
    try:
        figures = measure(options) if options else measure()
    except DirtyTree as error:
        parser.error(f"{name}: {error}")
    print(json.dumps(header(package, name, options) | figures, indent=2), flush=True)
    return not figures.get("failed")
