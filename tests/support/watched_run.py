"""Run directories as `opd run` leaves them, of any size, without engines."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_opd.metrics.rollouts import RolloutRow, TurnRow

CONFIG = """\
run: {dir: runs/demo, max_steps: %d}
student: {model: models/student-4b}
objective: {type: reverse_kl}
schedule: {type: async}
"""
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "a\u202eltr\u202c b",
    "\x1b[31mred\x1b[0m",
    "zero\u200bwidth",
    "'\"><svg onload=window.hacked=1>",
)
QUESTION = "<|user|>\nWhat is {a} * {b} + {c}?\n<|assistant|>\n"
WORDS = (
    "First multiply: {a} times {b} is {ab} . Then add {c} : {ab} plus {c} is {d} . "
    "Let me check : {a} times {b} is near {near} , so {d} looks right . The answer is {d} ."
)


def write_run(
    path: Path, *, updates: int = 60, per_update: int = 8, seed: int = 0, of: int | None = None
) -> Path:
    """A finished run with a summary. of: run.max_steps, where it differs from `updates`."""
    path.mkdir(parents=True)
    (path / "config.resolved.yaml").write_text(CONFIG % (of or updates))
    write_metrics(path, range(updates), of or updates)
    write_rollouts(path, range(updates), per_update, seed)
    write_trace(path, updates)
    (path / "summary.json").write_text('{"status": "finished", "cause": null}')
    return path


def make_running(path: Path) -> None:
    """Make this process the controller that holds the run."""
    (path / "summary.json").unlink(missing_ok=True)
    write_lock(path, os.getpid())


def make_crashed(path: Path) -> None:
    """A run whose controller was killed: its lock is left, no summary, rows are torn."""
    (path / "summary.json").unlink(missing_ok=True)
    write_lock(path, 2**22 + 1)  # above every pid
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (path / name).open("ab") as stream:
            stream.write(b'{"update": 99, "lo')


def write_lock(path: Path, pid: int) -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    held = {"pid": pid, "host": socket.gethostname(), "started": started, "token": "ab" * 32}
    (path / "run.lock").write_text(json.dumps(held))


def metrics_row(update: int, updates: int) -> dict[str, Any]:
    """A row of a run that learns, with some noise."""
    noise = float(np.random.default_rng(update).normal())
    done = (update + 1) / updates
    kl = 0.4 * np.exp(-4 * done) + 0.01 + 0.01 * abs(noise)
    row = {
        "update": update,
        "version": update,
        "loss": kl,
        "reverse_kl_nats": kl * 1.02,
        "entropy_nats": 0.3 + 0.1 * np.exp(-3 * done) + 0.004 * noise,
        "grad_norm": 1.5 * np.exp(-2 * done) + 0.1 * abs(noise),
        "reward_mean": min(1.0, 0.3 + 0.6 * (1 - np.exp(-4 * done)) + 0.02 * noise),
        "tokens_per_s": 900 + 30 * noise,
        "staleness_mean_versions": 0.4 + 0.05 * noise,
        "staleness_max_versions": 1 + (update % 7 == 3),
        "response_tokens_mean": 40 + 2 * noise,
        "window_learner_idle_ratio": 0.2 + 0.02 * noise,
        "window_sampler_idle_ratio": 0.1 + 0.01 * noise,
        "dropped_samples": update // 10,
        "time_s": 3.2 * (update + 1),
        "unix_time_s": 1.8e9 + 3.2 * (update + 1),
    }
    return {key: float(v) if isinstance(v, float) else v for key, v in row.items()}


def write_metrics(path: Path, updates: range, of: int) -> None:
    with (path / "metrics.jsonl").open("a") as stream:
        for update in updates:
            stream.write(json.dumps(metrics_row(update, of)) + "\n")


def write_evaluations(
    path: Path, updates: range, sets: tuple[str, ...], played: dict[str, float] | None = None
) -> None:
    """Accuracies of several held-out sets that rise, each from another level.

    played: means of their trajectories.
    """
    with (path / "evaluations.jsonl").open("a") as stream:
        for update in updates:
            for i, name in enumerate(sets):
                pct = 70.0 - 25 * i - 40 * 0.9**update
                row = {"update": update, "set": name, "accuracy_pct": pct, "time_s": 3.2 * update}
                row |= {"mean_reward": pct / 50} | (played or {})
                stream.write(json.dumps(row) + "\n")


def write_rollouts(path: Path, updates: range, per_update: int, seed: int = 0) -> None:
    encoder, rows = msgspec.json.Encoder(), rollout_rows(updates, per_update, seed)
    with (path / "rollouts.jsonl").open("ab") as stream:
        for row in rows:
            stream.write(encoder.encode(row) + b"\n")


def rollout_rows(updates: range, per_update: int, seed: int = 0) -> Iterator[RolloutRow]:
    """Rows of every update, each last one dropped in every fifth update."""
    rng = np.random.default_rng(seed)
    for update in updates:
        for i in range(per_update):
            dropped = i == per_update - 1 and update % 5 == 4
            yield rollout_row(rng, update, 64 * update + i * 64 // per_update, dropped=dropped)


def rollout_row(
    rng: np.random.Generator, update: int, uid: int, *, dropped: bool = False
) -> RolloutRow:
    a, b, c = (int(n) for n in rng.integers(2, 99, 3))
    right = rng.random() < 0.7
    d = a * b + c + (0 if right else 10)
    named = {"a": a, "b": b, "c": c, "ab": a * b, "d": d, "near": round(a * b, -2)}
    tokens = [f"{word} " for word in WORDS.format(**named).split()] + ["<|end|>"]
    student = -rng.exponential(0.25, len(tokens))
    teacher = np.minimum(student + rng.normal(-0.1, 0.35, len(tokens)), -0.0001)
    if not right:
        teacher[[i for i, token in enumerate(tokens) if token.strip() == str(d)]] -= 5.0
    change = int(rng.integers(5, len(tokens)))
    older = max(0, update - 1)
    spans = [(update, 0, len(tokens))]
    if older < update and rng.random() < 0.4:
        spans = [(older, 0, change), (update, change, len(tokens))]
    return RolloutRow(
        update=update,
        uid=uid,
        version=None if dropped else update,
        teacher="teacher",
        engine=f"http://127.0.0.1:{30000 + uid % 3}",
        reward=None if dropped else float(right),
        staleness_versions=None if dropped else update - spans[0][0],
        finish_reason="stop",
        drop_reason="nan_score" if dropped else None,
        drop_detail="http://127.0.0.1:31000 returned NaN" if dropped else None,
        unix_time_s=1.8e9 + 3.2 * update,
        spans=spans,
        prompt=QUESTION.format(**named),
        given=[],
        tokens=tokens,
        sampler_logp=np.round(student, 4).tolist(),
        teacher_logp=np.round(teacher, 4).tolist(),
    )


def hostile_row(update: int, uid: int) -> RolloutRow:
    """A rollout that attacks whoever shows it, in its prompt and in each token."""
    tokens = list(HOSTILE)
    logp = [-0.5] * len(tokens)
    return RolloutRow(
        update=update,
        uid=uid,
        version=update,
        teacher="<b>teacher</b>",
        engine="<i>engine</i>",
        reward=1.0,
        staleness_versions=0,
        finish_reason="stop",
        drop_reason=None,
        drop_detail=None,
        unix_time_s=1.8e9,
        spans=[(update, 0, len(tokens))],
        prompt=" ".join(HOSTILE),
        given=[],
        tokens=tokens,
        sampler_logp=logp,
        teacher_logp=logp,
    )


def turns_row(update: int, uid: int) -> RolloutRow:
    """Three turns with tools, the last in a sequence of its own; what tools say is hostile."""
    spoken = [
        (*("I ", "add ", "them. ", "<tool_call>"), '{"name": "calculate"}', "</tool_call>"),
        (*("Once ", "more. "), *HOSTILE),
        ("The ", "answer ", "is ", "84."),
    ]
    call = '{"expression": "9 + 75"}'
    turns = [
        TurnRow(
            start=0,
            sequence=0,
            branch="",
            reward=0.5,
            sampling_s=2.0,
            waiting_s=0.5,
            environment_s=4.0,
            cached=0,
            answered_by="tool",
            calls=[("calculate", call, None), ("calculate", "{}", HOSTILE[0])],
        ),
        TurnRow(
            start=6,
            sequence=0,
            branch="",
            reward=None,
            sampling_s=1.0,
            waiting_s=0.0,
            environment_s=1.25,
            cached=61,
            answered_by="user",
            calls=[("", "{}", "the call must be JSON: line 1"), (HOSTILE[1], HOSTILE[5], None)],
        ),
        TurnRow(
            start=6 + 2 + len(HOSTILE),
            sequence=1,
            branch="rewritten",
            reward=-1.0,
            sampling_s=1.0,
            waiting_s=0.25,
            environment_s=0.0,
            cached=70,
            answered_by="",
            calls=[],
        ),
    ]
    tokens = [token for turn in spoken for token in turn]
    logp = [-0.1 * (i % 9) for i in range(len(tokens))]
    asked = "<|im_start|>user\nWhat is 9 + 75?<|im_end|>\n<|im_start|>assistant\n"
    return msgspec.structs.replace(
        hostile_row(update, uid),
        prompt=asked,
        spans=[(update - 1, 0, 8), (update, 8, len(tokens))],
        given=[
            (6, f"<|im_end|>\n<|im_start|>tool\n{' '.join(HOSTILE)}<|im_end|>\n"),
            (turns[2].start, asked + "I add them. " * 200),
        ],
        turns=turns,
        played_s=10.0,
        reward=-0.5,
        tokens=tokens,
        sampler_logp=logp,
        teacher_logp=[each - 0.7 * (i % 4) for i, each in enumerate(logp)],
    )


def append_row(path: Path, row: RolloutRow) -> None:
    with (path / "rollouts.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode(row) + b"\n")


def write_trace(path: Path, updates: int, engines: int = 3) -> None:
    """A time line: engines sample, a learner trains, weight syncs pause the engines.

    Every tenth update is evaluated.
    """
    from megatron_opd.metrics.trace import TraceWriter

    rng = np.random.default_rng(1)
    trace = TraceWriter(path / "trace.json", 0.0)
    names = [f"student http://127.0.0.1:{30000 + i}" for i in range(engines)]
    for row in ("pipeline", *names, "teacher scoring", "learner", "weight sync"):
        trace.row(row)
    for update in range(updates):
        start_s = 3.2 * update
        for name in names:
            for _ in range(6):
                begin_s = start_s + 2.0 * float(rng.random())
                end_s = begin_s + 0.4 + float(rng.random())
                trace.span(name, f"rollout v{update}", begin_s, end_s, {"uid": 1})
                trace.span("teacher scoring", "score", end_s, end_s + 0.2)
        trace.span("learner", f"update {update}", start_s + 1.5, start_s + 2.8)
        trace.span("weight sync", f"weight sync v{update}", start_s + 2.8, start_s + 3.1, lane=1)
        for name in names:
            trace.span(name, "paused", start_s + 2.85, start_s + 3.05, lane=0)
        if update and update % 10 == 0:
            trace.span("evaluation", f"gsm8k after {update} updates", start_s, start_s + 4.5)
    trace.close()
