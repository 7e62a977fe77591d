"""Says what a server holds that only a program on another machine can ask.

python -m tests.e2e.holding URL CHECKPOINT, with its key in OPD_STUDENT_KEY.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from sglang_bridge.client import ServerClient
from tests.e2e.weight_sync import differing, load_tensors


async def held(url: str, checkpoint: Path) -> dict[str, object]:
    """Its version, how many pieces it holds, and which of them are not those of the checkpoint."""
    async with ServerClient(url, timeout_s=60, api_key=os.environ["OPD_STUDENT_KEY"]) as client:
        version, pieces = await client.version(), await client.weight_digests()
    tensors = load_tensors(checkpoint)
    missing = set(tensors) - {piece.hf_name for piece in pieces}
    return {"version": version, "differing": differing(pieces, tensors), "missing": sorted(missing)}


if __name__ == "__main__":
    json.dump(asyncio.run(held(sys.argv[1], Path(sys.argv[2]))), sys.stdout)
