"""Runs every check against a server and prints a table, or JSON.

Exit code 0: all hold. 1: one does not, or the server does not answer. 2: bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from sglang_bridge.client import ServerClient
from sglang_bridge.conformance import refusals, scores
from sglang_bridge.conformance.asking import Asked
from sglang_bridge.conformance.oracle import Oracle
from sglang_bridge.conformance.scores import Measured
from sglang_bridge.errors import BridgeError
from sglang_bridge.http import HttpConnection

TIMEOUT_S = 300.0
Check = Callable[[Asked], Awaitable[Measured]]


class ConformanceFinding(msgspec.Struct, frozen=True):
    """Tells what a check measured. error: why it could not; None: it could."""

    check: str
    holds: bool
    measured: float | None
    limit: float | None
    says: str
    error: str | None = None


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_bridge.conformance")
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:30000")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="its checkpoint: compare with transformers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    given = parser.parse_args(words)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"URL must begin with http:// or https://, got {given.url!r}")
    key = None if given.key_env is None else os.environ.get(given.key_env)
    if given.key_env is not None and not key:
        parser.error(f"--key-env must name a variable that is set, got {given.key_env}")
    oracle = None
    if given.model is not None:
        if not (given.model / "config.json").is_file():
            parser.error(f"--model must be a checkpoint's directory, got {given.model}")
        try:
            oracle = Oracle(given.model)
        except ImportError as error:
            parser.error(f"--model needs torch and transformers: install them ({error})")
    checks: list[Check] = [*scores.CHECKS, *refusals.CHECKS]
    checks += [] if oracle is None else [oracle.equals_the_model]
    try:
        found = asyncio.run(run(given.url, key, checks))
    except BridgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    text = msgspec.json.encode(found).decode() + "\n" if given.json else table(found)
    sys.stdout.write(text)
    return 0 if all(each.holds for each in found) else 1


async def run(url: str, key: str | None, checks: Sequence[Check]) -> list[ConformanceFinding]:
    """Returns what every check finds. Raises BridgeError where the server is no scorer."""
    http = HttpConnection(url, timeout_s=TIMEOUT_S, api_key=key)
    async with ServerClient(url, timeout_s=TIMEOUT_S, api_key=key) as client:
        asked = Asked(client, http, key)
        try:
            await asked.introduce()
            return [await finding(asked, check) for check in checks]
        finally:
            await http.close()


async def finding(asked: Asked, check: Check) -> ConformanceFinding:
    """Returns what one check finds."""
    name = getattr(check, "__name__", "").replace("_", " ")
    says = (check.__doc__ or "").strip().splitlines()[0].removeprefix("Checks that ")
    try:
        measured, limit = await check(asked)
    except BridgeError as error:
        return ConformanceFinding(name, False, None, None, says, str(error))
    holds = bool(measured <= limit)  # of either kind of number, numpy's or ours
    return ConformanceFinding(name, holds, float(measured), float(limit), says)


def table(found: Sequence[ConformanceFinding]) -> str:
    """Returns a line for each finding, and one for all."""
    lines = [
        f"{'holds' if f.holds else 'FAILS':6} {f.check:24} "
        + (f.error if f.error is not None else f"{f.measured:9.2e} <= {f.limit:7.1e}  {f.says}")
        for f in found
    ]
    failed = sum(not each.holds for each in found)
    return "\n".join([*lines, f"{len(found) - failed} of {len(found)} hold", ""])
