"""Agents that misbehave, each in the way that its row's answer names.

Of the standard library alone, so that any Python runs them.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request


def said(base_url, api_key, messages, **keys):
    """The message of a completion."""
    body = json.dumps({"model": "student", "messages": messages, **keys}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def orphan() -> int:
    """Start a process in a session of its own whose parent ends at once; returns its id."""
    shell = "setsid sleep 3600 >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout)


async def run(base_url, api_key, row, turns=2):
    """Make so many turns, then do it. well: return the number of turns."""
    does, messages = row["answer"], list(row["messages"])
    forever = does in ("never_ends", "never_ends_and_returns")
    for _ in range(0 if does == "calls_nothing" else 1000 if forever else turns):
        try:
            messages.append(said(base_url, api_key, messages))
        except urllib.error.HTTPError:
            if does == "never_ends":
                raise
            return 0.5
        messages.append({"role": "user", "content": "Go on."})
    return await AFTER[does](base_url, api_key, turns)


async def well(base_url, api_key, turns):
    return turns


async def raises(base_url, api_key, turns):
    raise RuntimeError("two\nlines \x1b[31m")


async def raises_unprintable(base_url, api_key, turns):
    raise UnprintableError


async def exits(base_url, api_key, turns):
    raise SystemExit(3)


async def cancels(base_url, api_key, turns):
    raise asyncio.CancelledError


async def dies(base_url, api_key, turns):
    os._exit(7)


async def eats(base_url, api_key, turns):
    return len(bytes(3 << 30))


async def hangs(base_url, api_key, turns):
    await asyncio.sleep(3600)


async def hangs_in_c(base_url, api_key, turns):
    time.sleep(3600)  # noqa: ASYNC251  which is its fault


async def starts_another(base_url, api_key, turns):
    asleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    return subprocess.Popen(asleep).pid  # noqa: ASYNC220


async def leaves_an_orphan(base_url, api_key, turns):
    return orphan()


async def sends_garbage(base_url, api_key, turns):
    """Ask what is refused, for ever."""
    while True:
        try:
            said(base_url, api_key, [{"role": "wizard"}])
        except urllib.error.HTTPError as error:
            if error.code != 400:  # its trajectory has ended
                raise
            await asyncio.sleep(0.05)


async def version(base_url, api_key, turns):
    """Say what runs it: its Python, and whether it has packages of the run's."""
    return sys.version_info[1] + ("aiohttp" in sys.modules)


def returns(value):
    """Do nothing else."""

    async def return_it(base_url, api_key, turns):
        return value

    return return_it


AFTER = {
    "well": well,
    "calls_nothing": well,
    "raises": raises,
    "raises_unprintable": raises_unprintable,
    "exits": exits,
    "cancels": cancels,
    "dies": dies,
    "eats": eats,
    "hangs": hangs,
    "hangs_in_c": hangs_in_c,
    "starts_another": starts_another,
    "leaves_an_orphan": leaves_an_orphan,
    "sends_garbage": sends_garbage,
    "version": version,
    "none": returns(None),
    "text": returns("1"),
    "nan": returns(float("nan")),
}


def not_async(base_url, api_key, row):
    return 1.0


async def wrong_arguments(base_url):
    return 1.0


NOT_CALLABLE = 7
