"""Runs a server: `python -m sglang_bridge.server [ARGUMENTS]`."""

from __future__ import annotations

from sglang_bridge.imports import keep_out
from sglang_bridge.server.entry import NEVER_IMPORTED, main

if __name__ in ("__main__", "__mp_main__"):  # the latter in processes that SGLang spawns
    keep_out(*NEVER_IMPORTED)
if __name__ == "__main__":
    main()
