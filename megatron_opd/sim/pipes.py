"""Models one direction of a link: bytes leave one after the other, then take their time."""

from __future__ import annotations

import asyncio


class Pipe:
    """Sends so many bytes a second, first come first served. bytes_per_s: None takes no time."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def send(self, num_bytes: int, further_s: float = 0.0) -> None:
        """Return once they have arrived: behind all earlier ones, and `further_s` after leaving."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s)
        if self._bytes_per_s is not None:
            self._free_s += num_bytes / self._bytes_per_s
        wait_s = self._free_s - now_s + further_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
