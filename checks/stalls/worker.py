"""Runs a data worker that says how many asyncio tasks it has when it gets SIGUSR1.

python -m checks.stalls.worker ADDRESS INDEX
"""

from __future__ import annotations

import asyncio

from benchmarks.data_workers.worker import main
from checks.stalls.asked import answer_signal


async def work() -> None:
    """Work until the controller ends it."""
    answer_signal()
    await main()


if __name__ == "__main__":
    asyncio.run(work())
