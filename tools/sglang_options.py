"""`python tools/sglang_options.py`: writes the table of the pinned SGLang's command-line options.

`opd check` reads sglang_bridge/server/options.txt on machines without SGLang, and without the
twenty seconds that its parser takes to import. A test holds the table to the installed SGLang.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_bridge.server.compat.hooks import SUPPORTED
from sglang_bridge.server.entry import offer_standins

FILE = Path(__file__).resolve().parents[1] / "sglang_bridge" / "server" / "options.txt"
NUMBERS = {int: "int", float: "float"}


def kind(action: argparse.Action) -> str:
    """flag, or how many words follow ("", ?, *, +) and what they are (str, int, float)."""
    if action.nargs == 0 or (action.const is not None and action.nargs is None):
        return "flag"
    return f"{action.nargs or ''}{NUMBERS.get(action.type, 'str')}"


def table() -> str:
    """A line for each option: dest, kind, names."""
    offer_standins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = [f"# SGLang {SUPPORTED}: made by tools/sglang_options.py"]
    lines += [
        f"{action.dest} {kind(action)} {' '.join(action.option_strings)}"
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
    print(FILE)
