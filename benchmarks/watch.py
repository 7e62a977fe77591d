"""The page of `opd watch` on 10^5 rollouts in a real browser, and what recording rollouts costs.

    python -m benchmarks watch [--rollouts N] [--times N]

Scroll: from the jump of the scroll bar to a place never seen until its rows are painted. Filter:
from the last key, or the choice, until the new list is painted. Both over loopback, the browser and
the server on the same machine; the server runs at the lowest priority, so other work on the machine
(load_average, of the minute before) slows it. Record: seconds of the recording thread and of the
event loop, and bytes on disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_opd.metrics.rollouts import RolloutRecord
from megatron_opd.records.sequences import single_turn
from megatron_opd.records.types import Batch, Prompt, Sample, VersionSpan
from sglang_bridge.protocol import DrawCache
from tests.support.browser import chromium, tab, watching
from tests.support.fakes import Figures
from tests.support.watched_run import write_run

PAGES = Path(__file__).parents[1] / "docs"
PER_UPDATE = 100
LIMIT_MS = 200.0
"""What the median of a scroll, and of a filter, must not exceed."""
RECORDED_TOKENS = 1000

SCROLL = """async (row) => {
  const list = document.getElementById("list");
  const begun = performance.now();
  list.scrollTop = row * 66;
  while (!document.getElementById(`row-${row}`)) await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begun;
}"""
FILTER = """async ([name, value]) => {
  const form = document.getElementById("filters");
  const field = form.elements[name];
  field.value = value;
  const begun = performance.now();
  field.dispatchEvent(new Event("input", { bubbles: true }));
  while (JSON.parse(form.dataset.query)[name] !== value) await new Promise(requestAnimationFrame);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begun;
}"""


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Return medians and worst times in milliseconds; `failed` where a median is above LIMIT_MS."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks watch")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=60)
    given = parser.parse_args(list(options))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, updates=given.rollouts // PER_UPDATE, per_update=PER_UPDATE)
        page = measure_page(run, given.rollouts, given.times)
        page["rollouts_bytes"] = (run / "rollouts.jsonl").stat().st_size
    failed = max(page["scroll_ms"]["median"], page["filter_ms"]["median"]) > LIMIT_MS
    return {"rollouts": given.rollouts, **page, "record": measure_record(), "failed": failed}


def measure_page(run: Path, rollouts: int, times: int) -> dict[str, Any]:
    """Open the page, then scroll and filter `times` times each."""
    rng = np.random.default_rng(0)
    load, begun_s = os.getloadavg()[0], time.perf_counter()
    with watching(run) as address, chromium() as browser, tab(browser) as opened:
        page = opened.page
        page.goto(f"{address}#rollouts")
        page.get_by_text(f"{rollouts:,} rollouts", exact=True).wait_for()
        opened_s = time.perf_counter() - begun_s
        rows = [int(row) for row in rng.integers(200, rollouts, times)]
        scrolls = [page.evaluate(SCROLL, row) for row in rows]
        filters = [page.evaluate(FILTER, list(each)) for each in filters_to_try(rng, times)]
        server = next(child for child in psutil.Process().children() if "watch" in child.cmdline())
        rss_bytes = server.memory_info().rss
        problems = opened.problems
    return {
        "load_average": round(load, 1),
        "start_to_whole_list_s": round(opened_s, 2),
        "scroll_ms": spread_of(scrolls),
        "filter_ms": spread_of(filters),
        "server_rss_bytes": rss_bytes,
        "console_problems": problems,
    }


def filters_to_try(rng: np.random.Generator, times: int) -> list[tuple[str, str]]:
    """Texts, bounds and orders in turn, each another than before."""
    found: list[tuple[str, str]] = []
    for i in range(times):
        choices = (
            ("text", f"{rng.integers(100, 9999)}"),
            ("update_min", f"{i}"),
            ("reward_max", f"{0.5 + i / 1000}"),
            ("sort", ("gap", "tokens", "reward", "update")[i // 5 % 4]),
            ("text", ""),
        )
        found.append(choices[i % 5])
    return found


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and largest, with the number of values."""
    median, high = np.percentile(values, [50, 90])
    figures = {"median": median, "p90": high, "max": max(values)}
    return {"times": len(values)} | {key: round(float(v), 1) for key, v in figures.items()}


def measure_record(batches: int = 10) -> dict[str, float]:
    """Record responses of RECORDED_TOKENS tokens: time of the thread and event loop, bytes."""
    tokenizer = byte_tokenizer()
    sample = _sample(tokenizer, RECORDED_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        record = RolloutRecord(
            path, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), 1
        )
        thread_s = looped_s = 0.0
        for update in range(batches):
            size, begun_s = path.stat().st_size, time.perf_counter()
            record.trained(Batch(update, update, (sample,)), Figures(), 0.0, 1.0)
            looped_s += time.perf_counter() - begun_s
            while path.stat().st_size == size:  # updates of a run are further apart
                time.sleep(1e-4)
            thread_s += time.perf_counter() - begun_s
        record.close()
        size = path.stat().st_size
    tokens = batches * RECORDED_TOKENS
    return {
        "thread_us_per_token": round(1e6 * thread_s / tokens, 2),
        "event_loop_us_per_rollout": round(1e6 * looped_s / batches, 1),
        "bytes_per_token": round(size / tokens, 1),
    }


def byte_tokenizer() -> Tokenizer:
    """Train a byte-level BPE, the kind that most models have, on this project's pages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(PAGES.glob("*.md"))], trainer)
    return tokenizer


def _sample(tokenizer: Tokenizer, tokens: int) -> Sample:
    rng = np.random.default_rng(0)
    prompt = Prompt(0, "1+1=", np.arange(30, 60, dtype=np.int32))
    draws = DrawCache(
        offsets_T1=np.arange(tokens + 1, dtype=np.int64),
        ids_N=np.full(tokens, 40, np.int32),
        weight_N=np.ones(tokens, np.float32),
        sampler_logp_N=-rng.exponential(1.0, tokens).astype(np.float32),
        path_T=np.arange(tokens, dtype=np.int64),
    )
    text = (PAGES / "losses.md").read_text(encoding="utf-8")
    ids_T = np.array(tokenizer.encode(text).ids[:tokens], np.int32)
    assert len(ids_T) == tokens
    spans = (VersionSpan(0, 0, tokens),)
    rollout = single_turn(prompt, ids_T, draws, spans, "stop", 0.0, 1.0)
    return Sample(rollout, -rng.exponential(1.0, tokens).astype(np.float32))
