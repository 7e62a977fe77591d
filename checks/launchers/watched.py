"""Looks from outside at a run with data workers, hurts it in one way, and looks at what is left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_opd.wire.keys import KEYS_FILE
from tests.support.secrets import found_in, secrets_in

FACTS = "watched.json"
WORKER = "megatron_opd.data_workers"
CONTROLLER = ("megatron_opd", "run")
FAULTS = ("", "one killed", "all killed", "interrupted")
FIRST_UPDATE_S, LEFT_S, POLL_S = 300.0, 20.0, 0.1
FINISHED = ("", "one killed")
"""A run goes on to its end where a worker is started again."""


def as_meant(figures: Mapping[str, Any]) -> bool:
    """Return whether a run ended as it should have, and left nothing and told nothing."""
    facts = figures.get("watched")
    if facts is None:
        return figures["status"] == "finished"
    finished = (figures["status"], figures["exit_code"]) == ("finished", 0)
    lost = {"": 0, "one killed": 1, "all killed": 2, "interrupted": 0}[facts["fault"]]
    clean = not any(facts[key] for key in ("processes_left", "secrets_in"))
    ended = finished if facts["fault"] in FINISHED else figures["exit_code"] != 0
    return clean and ended and facts["workers_seen"] == 2 and figures["data_workers_lost"] == lost


class Watched:
    """Watches the run of `directory` from a thread.

    fault: one of FAULTS, which happens once an update is made.
    """

    def __init__(self, directory: Path, fault: str) -> None:
        assert fault in FAULTS
        self._directory, self._run, self._fault = directory, directory / "run", fault
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._over = threading.Event()
        self._secrets: list[str] = []
        self._facts: dict[str, Any] = {"fault": fault, "workers_seen": 0, "secrets_in": []}

    def begin(self, folder: Path) -> None:
        """Begin to look. folder: of the cluster's own files."""
        self._folder = folder
        self._thread.start()

    def end(self) -> None:
        """Look at what is left once the run has ended, and write it all to the directory."""
        self._over.set()
        self._thread.join()
        began_s = time.monotonic()
        while (left := self._processes()) and time.monotonic() < began_s + LEFT_S:
            time.sleep(POLL_S)
        self._facts["processes_left"] = [" ".join(_words(each))[:200] for each in left]
        self._facts["gone_after_s"] = round(time.monotonic() - began_s, 1)
        # that of the keys themselves is removed, or is the only one
        for directory in (self._directory, self._folder):
            for path in found_in(directory, self._secrets) if self._secrets else ():
                if path != self._run / KEYS_FILE:
                    self._facts["secrets_in"].append(str(path.relative_to(directory)))
        self._facts["secrets"] = len(self._secrets)
        (self._directory / FACTS).write_text(json.dumps(self._facts), encoding="utf-8")

    def _watch(self) -> None:
        rows, deadline_s = self._run / "metrics.jsonl", time.monotonic() + FIRST_UPDATE_S
        while not (rows.exists() and rows.read_bytes().count(b"\n")):
            if self._over.wait(POLL_S) or time.monotonic() > deadline_s:
                return
        workers = [each for each in self._processes() if self._is(each, WORKER)]
        self._facts["workers_seen"] = len(workers)
        self._secrets = secrets_in(self._run / KEYS_FILE)
        for process in psutil.process_iter():
            line = " ".join(_words(process))
            if any(secret in line for secret in self._secrets):
                self._facts["secrets_in"].append(f"arguments of {process.pid}")
        if self._fault == "interrupted":
            (controller,) = (each for each in self._processes() if self._is(each, *CONTROLLER))
            os.kill(controller.pid, signal.SIGINT)
        elif self._fault:
            for worker in workers[: 1 if self._fault == "one killed" else None]:
                worker.kill()

    def _processes(self) -> list[psutil.Process]:
        """Return all of the run's, wherever they are on this machine."""
        here = f"{self._run}"
        return [p for p in psutil.process_iter() if any(here in word for word in _words(p))]

    @staticmethod
    def _is(process: psutil.Process, *words: str) -> bool:
        """Return whether Python runs this module, with these first arguments."""
        return _words(process)[1 : 2 + len(words)] == ["-m", *words]


def _words(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []
