"""Servers' words about their passes, for traces of runs that were simulated."""

import json
import random
from pathlib import Path

import msgspec

from megatron_opd.sim.costs import Costs
from sglang_bridge.work import PassSums, ServerWork


def add_looks(trace: Path, costs: Costs) -> None:
    """Add to a trace what servers of these costs tell at four looks, whatever they did in it."""
    lines = trace.read_text().removesuffix("\n]\n").split(",\n")
    events = [json.loads(line.removeprefix("[\n")) for line in lines]
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    end = max(event["ts"] for event in events if event["ph"] == "X")
    student = next(n.removeprefix("student ") for n in rows if n.startswith("student "))
    luck, decode, prefill, scores = random.Random(0), PassSums(), PassSums(), PassSums()
    for ts in (0, end // 3, 2 * end // 3, end):
        for row, url, work in (
            (f"student {student}", student, ServerWork(decode, prefill)),
            ("teacher scoring", "t", ServerWork(prefill=scores)),
        ):
            args = {"server": url, **msgspec.to_builtins(work)}
            look = {"ph": "i", "s": "p", "pid": rows[row], "tid": 0, "name": "work"}
            lines.append(json.dumps(look | {"ts": ts, "args": args}))
        used = {"controller": 1.0, student: decode.cpu[0] + prefill.cpu[0], "t": scores.cpu[0]}
        look = {"ph": "C", "pid": rows["pipeline"], "name": "CPU seconds", "ts": ts}
        lines.append(json.dumps(look | {"args": {"cores": costs.host_cores, **used}}))
        for _ in range(200):
            n, tokens = luck.randint(1, 8), luck.randint(1, 60)
            engine, teacher = costs.engine, costs.teachers["teacher"]
            took = engine.step_s + n * engine.step_request_s
            decode = decode.plus(n, 50 * n, 2 * took, took)
            took = n * engine.request_s
            prefill = prefill.plus(n, tokens * n, 2 * took, took)
            took = teacher.pass_s + n * teacher.request_s + n * tokens * teacher.token_s
            scores = scores.plus(n, n * tokens, 2 * took, took)
    trace.write_text(",\n".join(lines) + "\n]\n")
