"""Waits longer for a server that starts as long as its log names kernels that it compiles.

SGLang and flashinfer compile kernels with nvcc that are not in their caches yet: most of them when
a server first starts. Each rank names a kernel in the log before it compiles it, or waits for the
process that does: SGLang's by a hook, flashinfer's by its own message.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

SAID = "sglang_bridge: compiles kernel "
_NAMES = re.compile(rf"{SAID}(\S+)|Building JIT module (\S+);")


def say_kernel(scope: Path, *args: Any, **kwargs: Any) -> None:
    """Names a kernel in the log; a hook before SGLang's lock on the directory of its builds.

    scope: .../KERNEL/build-KEY.
    """
    sys.stderr.write(f"{SAID}{scope.parent.name}\n")
    sys.stderr.flush()


def kernels(log: Path) -> list[str]:
    """Returns the names of the kernels that a server's log has, each once, in their order."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(ours or theirs for ours, theirs in _NAMES.findall(text)))


def progress(log: Path) -> str:
    """Returns how far a server that starts is with its kernels, in words; "" where it has none."""
    found = kernels(log)
    if not found:
        return ""
    return f" (compiling kernels, which are kept: {len(found)} so far, the last {found[-1]})"


class StartLimit:
    """Limits the wait for a server that starts to `timeout_s`, counted anew after new kernels."""

    def __init__(self, timeout_s: float, log: Path) -> None:
        self._timeout_s, self._log = timeout_s, log
        self._deadline_s = time.monotonic() + timeout_s
        self._counted = 0

    def is_over(self) -> bool:
        """Returns whether the time has passed and the log has no kernel that is not counted yet."""
        if time.monotonic() < self._deadline_s:
            return False
        found = len(kernels(self._log))
        if found == self._counted:
            return True
        self._counted = found
        self._deadline_s = time.monotonic() + self._timeout_s
        return False

    def said(self) -> str:
        """Returns what a server that was not ready in time did not do, and how long it had."""
        late = f"was not ready within {self._timeout_s:g} s"
        found = kernels(self._log)
        if not found:
            return late
        return (
            f"{late}, counted anew while it compiled {len(found)} kernels, the last {found[-1]}; "
            "what is compiled is kept, so its next start is shorter"
        )
