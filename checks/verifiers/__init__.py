"""How answers are judged: a table of pairs, by us and by math-verify alone, and how fast.

    python -m checks verifiers

pairs.jsonl holds answers of mixed notation with a response and whether a person takes it for right.
`ours` is data.task: math, `exact` is data.task: exact, `library` is math-verify as its own page
shows it, given the whole response. Verifiers that misbehave and the sandbox's limits are tests
(tests/unit/data/verifiers).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

from megatron_opd.data.tasks.answers import marked_answer
from megatron_opd.data.tasks.exact import verify as exact
from megatron_opd.data.verifiers.messages import Call
from megatron_opd.data.verifiers.pool import PoolLimits, VerifierPool

PAIRS = Path(__file__).with_name("pairs.jsonl")
WORKERS = 2
Row = dict[str, Any]


def measure() -> dict[str, Any]:
    """The table, its disagreements, and how fast a pool judges it."""
    rows = judged_pairs()
    return {
        "pairs": len(rows),
        "right": sum(row["right"] for row in rows),
        **{
            f"{name}_agrees": sum(row[name] == row["right"] for row in rows)
            for name in ("ours", "library", "exact")
        },
        "disagreements": [row for row in rows if row["ours"] != row["right"]],
        "differs_from_library": [row for row in rows if row["ours"] != row["library"]],
        "rate": asyncio.run(rate(rows)),
    }


def judged_pairs() -> list[Row]:
    """Every pair with the three judgements."""
    from megatron_opd.data.tasks.maths import verify as ours

    logging.disable(logging.WARNING)  # the library warns that it has no time limit
    rows: list[Row] = [json.loads(line) for line in PAIRS.open(encoding="utf-8")]
    for row in rows:
        row["ours"] = bool(ours(row["response"], row["answer"]))
        row["library"] = library(row["response"], row["answer"])
        row["exact"] = bool(exact(row["response"], row["answer"]))
    return rows


def library(response: str, answer: str) -> bool:
    """What math-verify says by itself, with its default settings and no time limit."""
    from math_verify import parse, verify

    gold = parse(f"${marked_answer(answer) or answer}$", parsing_timeout=None)
    return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))


async def rate(rows: list[Row]) -> dict[str, Any]:
    """How many pairs a pool judges in a second, and the longest pause of the event loop."""
    limits = PoolLimits(WORKERS, 60.0, 4 * 2**30)
    calls = {"math": Call("megatron_opd.data.tasks.maths:verify")}
    async with VerifierPool(calls, limits) as pool:
        # the first judgements import the library
        await asyncio.gather(*(pool.verify("math", "\\boxed{1/2}", "0.5") for _ in range(8)))
        started_s, longest_s = time.monotonic(), 0.0
        asked = asyncio.gather(*(pool.verify("math", r["response"], r["answer"]) for r in rows))
        while not asked.done():
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - before_s)
        rewards, seconds = await asked, time.monotonic() - started_s
    assert [reward == 1 for reward in rewards] == [row["ours"] for row in rows]
    return {
        "workers": WORKERS,
        "pairs_per_s": round(len(rows) / seconds, 1),
        "longest_pause_ms": round(1000 * longest_s, 1),
    }
