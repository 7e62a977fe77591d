"""Compares a teacher's scores with a forward pass that is not its server's (scoring.guard)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from megatron_opd.checkpoint.hf_formats import model_tensors
from megatron_opd.config.servers import ServerConfig
from megatron_opd.records.types import FloatArray
from sglang_bridge.errors import one_line
from sglang_bridge.protocol import ScoreRequest
from sglang_bridge.server import options

LIMIT_S = 300.0
"""Longest time that a pass may take, loading included; there is none beyond it."""
MEMORY_SHARE = 0.7
"""Share of the free memory of this machine that a model may take."""
RESERVE_BYTES = 2 * 2**30
"""Memory that the process takes besides the model."""
OVERRIDE = "json_model_override_args"
"""SGLang's setting with which a server runs another model than its directory holds."""
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class SecondPass:
    """Holds the log-probs [N] of each passage.

    by: what made the pass; None: there is none, and `why`. dtype: that it was made in.
    """

    by: str | None
    why: str = ""
    dtype: str = "float32"
    logp: tuple[FloatArray, ...] = ()


async def second_pass(section: ServerConfig, passages: Sequence[ScoreRequest]) -> SecondPass:
    """Let another program score the passages, on the processors of this machine.

    It runs in a process of its own, whose memory ends with it.
    """
    if OVERRIDE in options.given(section.extra_args).values():
        return SecondPass(None, "extra_args change the model that is served")
    try:
        dtype = dtype_that_fits(section.model, free_bytes())
    except ValueError as error:
        return SecondPass(None, str(error))
    env = {key: value for key, value in os.environ.items() if key not in OURS}
    command = [sys.executable, "-m", "megatron_opd.learner.reference", str(section.model), dtype]
    # not a pipe: event loops differ in what a write says once its reader has ended
    with tempfile.TemporaryFile("w+") as asked:
        json.dump([_as_json(passage) for passage in passages], asked)
        asked.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            str(passages[0].temperature),
            stdin=asked,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=env | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        return SecondPass(None, f"it took more than {LIMIT_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode(errors="replace").splitlines()
    if process.returncode or not lines:
        return SecondPass(None, f"its process ended with status {process.returncode}")
    found = json.loads(lines[-1])
    if found["by"] is None:
        return SecondPass(None, one_line(found["why"], 400))
    logp = tuple(np.array(each, np.float32) for each in found["logp"])
    return SecondPass(found["by"], found["why"], dtype, logp)


def dtype_that_fits(path: Path, free: int) -> str:
    """Return float32, or the type to take where memory is short. ValueError: none fits."""
    stored = model_tensors(path).values()
    numbers = sum(prod(each.shape) for each in stored)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        if numbers * size + RESERVE_BYTES <= free * MEMORY_SHARE:
            return dtype
    raise ValueError(
        f"its {numbers * 2 / 1e9:.1f} GB in bfloat16 need more than {MEMORY_SHARE:.0%} of the "
        f"{free / 1e9:.1f} GB of free memory here"
    )


def free_bytes() -> int:
    """Return how much memory a new process may take on this machine."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        sizes = dict(line.split(":") for line in lines)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def _as_json(passage: ScoreRequest) -> dict[str, object]:
    return {
        "input_ids": np.asarray(passage.input_ids).tolist(),
        "runs": passage.runs,
        "offsets": np.asarray(passage.offsets_T1).tolist(),
        "ids": np.asarray(passage.ids_N).tolist(),
    }
