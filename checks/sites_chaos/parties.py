"""One run of `python -m checks sites_chaos`: `opd run`, and sites that die and return."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from checks.link.proxy import Proxy
from harness.processes import END_S, OPD, started
from harness.run_dirs import updates_of
from megatron_opd.sites.keys import SiteKeys, keys_file

BASE = Path("examples/sites/two_sites.yaml")
LINK = {"heartbeat_s": 0.5, "silence_s": 5.0, "chunk_bytes": 1 << 18}
EVERY_ROW = 1 << 20
"""More samples than an update has: rollouts.jsonl gets a row of each."""
STALLED_S = 300.0
"""A run without an update for so long does not come back."""
LEFT_S = 60.0
"""Longest time in seconds until servers of a site that was killed have ended."""
LOOK_S = 0.1
Tree = dict[str, Any]


class RunOver(RuntimeError):
    """Reports that a run has ended, or stands still, before what was waited for."""


def write_config(
    out: Path, port: int, members: Mapping[str, Tree], sections: Mapping[str, Tree]
) -> Path:
    """Write the configuration of a run below `out`: the example's, smaller and quicker to mend."""
    tree = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    tree["run"] |= {"dir": str(out / "run")}
    tree["weight_sync"] |= {"directory": str(out / "weights")}
    tree["sites"] |= {"members": dict(members), "port": port, "link": LINK, "lost_after_s": 3.0}
    tree["sites"] |= {"weight_delays": {"type": "none"}}
    tree |= {"metrics": {"rollouts": EVERY_ROW, "tensorboard": False}}
    tree |= {"checkpoint": {"export_hf": False}}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | dict(values)
    path = out / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


class Party:
    """Holds the learner's site of one run, and the sites that were started for it.

    stack: ends what is left at its end. out: a directory for this run alone. words, module: start
    `opd run`, see harness/processes.py.
    """

    def __init__(
        self, stack: ExitStack, out: Path, config: Path, words: list[str], module: str = OPD
    ) -> None:
        self._stack, self._out, self.config = stack, out, config
        self.run_dir = out / "run"
        self._starts: dict[str, int] = {}
        self._orphans: list[psutil.Process] = []
        command = [*words, "run", str(config)]
        self.run = stack.enter_context(started(out / "learner-0.log", *command, module=module))

    def keys(self, name: str, address: str | None = None) -> Path:
        """Return a site's file of keys, once it is there; with another address, a copy of it."""
        path = keys_file(self.run_dir, name)
        self.wait(path.exists)
        keys = SiteKeys.read(path)
        assert keys is not None
        if address is None:
            return path
        copy = self._out / f"{name}.keys"
        SiteKeys(address, keys.learner, keys.secret).write(copy)
        return copy

    def site(self, name: str, keys: Path, words: list[str], module: str) -> subprocess.Popen[bytes]:
        """Start a site; each start has a log of its own."""
        number = self._starts.get(name, 0)
        self._starts[name] = number + 1
        command = [*words, "site", name, str(self.config), "--keys", str(keys)]
        log = self._out / f"{name}-{number}.log"
        return self._stack.enter_context(started(log, *command, module=module))

    def kill(self, site: subprocess.Popen[bytes]) -> int:
        """Kill a site's process alone; returns how many others it had, which end by themselves."""
        children = psutil.Process(site.pid).children(recursive=True)
        self._orphans += children
        site.kill()
        site.wait()
        return len(children)

    def left(self) -> list[str]:
        """Return the commands of processes of killed sites that do not end."""
        _, alive = psutil.wait_procs(self._orphans, timeout=LEFT_S)
        return [" ".join(each.cmdline())[:200] for each in alive
                if each.status() != psutil.STATUS_ZOMBIE]  # fmt: skip

    def said(self, name: str) -> str:
        """Return what all starts of a process wrote."""
        logs = sorted(self._out.glob(f"{name}-*.log"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def welcomes(self, name: str) -> int:
        """Return how many processes of a site the learner's site has taken in."""
        return self.said("learner").count(f"site {name} is there")

    def wait(self, happened: Callable[[], bool]) -> None:
        """Wait. RunOver: the run has ended or stands still before."""
        made, since_s = self.made(), time.monotonic()
        while not happened():
            if self.run.poll() is not None:
                raise RunOver(f"opd run has ended with {self.run.returncode}")
            if (now := self.made()) != made:
                made, since_s = now, time.monotonic()
            if time.monotonic() - since_s > STALLED_S:
                raise RunOver(f"no update in {STALLED_S:g} s after {made}")
            time.sleep(LOOK_S)

    def finish(self) -> int | None:
        """Wait for the end of the run; returns its exit code, None: it stands still."""
        try:
            self.wait(lambda: self.run.poll() is not None)
        except RunOver:
            return None
        return self.run.returncode

    def made(self) -> int:
        """Return how many updates there are."""
        return len(updates_of(self.run_dir))


def code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a site whose run has ended; None: it does not end."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def proxied(proxy: Proxy) -> Iterator[str]:
    """Serve a proxy in a thread; yields the address that it listens on."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(_closed(proxy), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _closed(proxy: Proxy) -> None:
    """Close a proxy, and wait for the ends of its connections."""
    await proxy.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
