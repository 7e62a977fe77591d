"""Runs a data worker for the benchmark.

python -m benchmarks.data_workers.worker ADDRESS INDEX
"""

from __future__ import annotations

import asyncio
import os
import sys

from benchmarks.data_path.cases import DRAWS
from megatron_opd.data_workers.worker import Worker
from megatron_opd.wire.keys import RANK_VARIABLE, RankKeys


async def main() -> None:
    """Work until the controller ends it."""
    keys = RankKeys.parse(os.environ[RANK_VARIABLE])
    await Worker(sys.argv[1], int(sys.argv[2]), "127.0.0.1", keys, None, DRAWS).run()


if __name__ == "__main__":
    asyncio.run(main())
