"""Which families' servers give transformers' log-probs, and what SGLang would serve wrongly.

    python -m checks families > benchmarks/results/families.json && python tools/pages.py

Tiny random checkpoints, float32, of tests/support/families.py; each is served, scores prompts of up
to 255 tokens (whole, in chunks, with cached prefixes, concurrently) and samples. Control: every
tensor in turn is changed by 1 % in transformers' copy, which the server's scores must tell.
`limited` is served beyond its window or original context, and within; `misserved` is served all the
same, to see by how much it would be wrong. Both are then asked for as teachers and must be refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.header import header
from harness.tree import ROOT
from megatron_opd.config.teacher import TeacherConfig
from megatron_opd.errors import UserError
from megatron_opd.inputs.model_facts import check_exact, read_served
from megatron_opd.inputs.served_rules import DELTA_NET, MEASURED, rope_settings, rope_type
from sglang_bridge.errors import ModelRefused
from sglang_bridge.ports import free_port
from sglang_bridge.server.forks import preload
from sglang_bridge.server.launch import ServerProcess
from sglang_bridge.server.spec import ServerSpec, server_env
from tests.support.families import LIMITED, MISSERVED, SERVED, Maker, TinyFamily, make
from tests.support.family_errors import ARGUMENTS, PROMPTS, ROLLOUTS, Answers, ask, errors, seen
from tests.support.oracles import load_reference

LIMIT_NATS = 2e-5
"""Largest error of a family that is served rightly; the largest seen is half of it."""
DELTA_NET_NATS = 1e-4
"""The same of gated delta nets: with a cached prefix the rule's chunks begin elsewhere, and each
rounds in float32 what exponentials of sums of decays make large."""
TELLS = 4.0
"""How much more than a family's error each changed tensor must show."""
NAMES = (*SERVED, *MISSERVED)
"""What may be measured anew by itself."""
RECORD = "benchmarks/results/families.json"
UNREAD = "which nothing reads"


def measure(options: Sequence[str] = ()) -> dict[str, Any]:
    """Every family's figures; with --only NAME... those, beside the record's of the others."""
    parser = argparse.ArgumentParser(prog="python -m checks families")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, default=[])
    only = parser.parse_args(options).only
    if only:
        return added(only)
    torch.set_num_threads(1)
    below = preload(server_env(ServerSpec(model_path="", role="student", port=1)))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            base = Path(scratch)
            served = [measured_served(name, each, base) for name, each in SERVED.items()]
            limited = [measured_limited(name, each, base) for name, each in LIMITED.items()]
            misserved = [
                measured_misserved(name, family, words, base)
                for name, (family, words) in MISSERVED.items()
            ]
    finally:
        below.close()
    rows = [*served, *limited, *misserved]
    failed = [f"{row['name']}: {row['failed']}" for row in rows if row["failed"]]
    missing = missing_pairs(served, limited)
    if missing:
        failed.append(f"in the list of architectures, and not measured: {', '.join(missing)}")
    return {
        "served": served,
        "limited": limited,
        "misserved": misserved,
        "largest_nats": max(row["nats"] for row in served),
        "failed": failed,
    }


def added(names: Sequence[str]) -> dict[str, Any]:
    """The record, with rows of `served` and `misserved` measured anew or first."""
    record: dict[str, Any] = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    below = preload(server_env(ServerSpec(model_path="", role="student", port=1)))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            base = Path(scratch)
            found = [measured_served(name, SERVED[name], base) for name in names if name in SERVED]
            wrong = [
                measured_misserved(name, *MISSERVED[name], base)
                for name in names
                if name in MISSERVED
            ]
    finally:
        below.close()
    rows = {row["name"]: row for row in [*record["served"], *found]}
    wrongs = {row["name"]: row for row in [*record["misserved"], *wrong]}
    now = header("checks", "families", ["--only", *names])
    later = [*record.get("later", []), {key: now[key] for key in ("command", "commit")}]
    failed = [f"{row['name']}: {row['failed']}" for row in [*found, *wrong] if row["failed"]]
    served = [rows[name] for name in SERVED if name in rows]
    return {
        **record,
        "later": later,
        "served": served,
        "misserved": [wrongs[name] for name in MISSERVED if name in wrongs],
        "largest_nats": max(row["nats"] for row in served),
        "failed": failed,
    }


def measured_served(name: str, family: TinyFamily | Maker, base: Path) -> dict[str, Any]:
    """The errors of one family, and the changed tensor that shows least."""
    path = make(family, base / name)
    facts = read_served(path, "teacher.model")
    check_exact("teacher", facts, TeacherConfig(model=path))
    with serving(path) as url:
        answers = ask(url)
    model = load_reference(path)
    found, changed = errors(answers, model), seen(answers, model)
    nats, tensor = max(found.values()), min(changed, key=changed.__getitem__)
    failed = ""
    if not nats <= (DELTA_NET_NATS if DELTA_NET in facts.raw else LIMIT_NATS):
        failed = f"{nats:.2g} nats"
    elif not changed[tensor] >= TELLS * nats:
        failed = f"{tensor} may change unseen"
    row = {
        "name": name,
        "architecture": facts.architecture,
        "rope": rope_of(facts.raw),
        "errors": dict(found),
        "nats": nats,
        "tensors": len(changed),
        "least_seen_nats": changed[tensor],
        "least_seen": tensor,
        "failed": failed,
    }
    return said(row)


def measured_limited(name: str, family: TinyFamily, base: Path) -> dict[str, Any]:
    """The errors of one family beyond its limit and within, and what refuses it beyond."""
    path = make(family, base / name)
    facts = read_served(path, "teacher.model")
    assert facts.exact is not None, name
    limit = facts.exact.tokens
    model = load_reference(path)
    with serving(path) as url:
        beyond = max(errors(ask(url), model).values())
    room = limit - 8  # SGLang keeps some of a context free
    prompts = tuple((p, min(t, room - p)) for p, t in PROMPTS if p < room)
    rollouts = tuple((p, min(t, room - p)) for p, t in ROLLOUTS if p < room)
    with serving(path, context_length=limit) as url:
        within = max(errors(ask(url, prompts, rollouts), model).values())
    check_exact("teacher", facts, TeacherConfig(model=path, context_length=limit))
    refusal = refused(path)
    wrong = beyond > 100 * LIMIT_NATS
    failed = "" if refusal and wrong and within <= LIMIT_NATS else f"{beyond:.2g}, {within:.2g}"
    row = {
        "name": name,
        "architecture": facts.architecture,
        "rope": rope_of(facts.raw),
        "limit": limit,
        "nats_beyond": beyond,
        "nats_within": within,
        "refusal": refusal,
        "failed": failed,
    }
    return said(row)


def measured_misserved(name: str, family: TinyFamily, words: str, base: Path) -> dict[str, Any]:
    """How wrong one family is served, and what refuses it. nats: None where no server starts."""
    path = make(family, base / name)
    refusal, nats, server = refused(path), None, None
    model = load_reference(path)
    try:
        with serving(path) as url:
            answers: Answers | None = ask(url)
    except ModelRefused as error:
        server = str(error).partition(" (see ")[0].replace(str(path), "MODEL")
        answers = ask_without_biases(path) if UNREAD in server else None
    if answers is not None:
        nats = max(errors(answers, model).values())
    right = nats is not None and nats < 100 * LIMIT_NATS
    failed = "" if words in (refusal or "") and not right else f"{refusal}, {nats}"
    row = {"name": name, "nats": nats, "refusal": refusal, "server": server, "failed": failed}
    return said(row)


def ask_without_biases(path: Path) -> Answers:
    """What a server says that leaves the biases unread, which refuses them now."""
    copy = path.with_name(f"{path.name} without biases")
    shutil.copytree(path, copy)
    tensors = load_file(copy / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.endswith(".bias")}
    save_file(kept, copy / "model.safetensors", {"format": "pt"})
    with serving(copy) as url:
        return ask(url)


@contextmanager
def serving(path: Path, context_length: int | None = None) -> Iterator[str]:
    """Serve a checkpoint as a teacher."""
    spec = ServerSpec(
        model_path=str(path),
        role="teacher",
        port=free_port(),
        dtype="float32",
        context_length=context_length,
        max_total_tokens=8192,
        max_running_requests=16,
        mem_fraction_static=0.3,
        extra_args=ARGUMENTS,
    )
    process = ServerProcess(spec, path.with_name(f"{path.name}.log"))
    try:
        process.start()
        process.wait_ready(300)
        yield process.url
    finally:
        process.stop(grace_s=1)


def refused(path: Path) -> str | None:
    """Why a checkpoint is refused as a teacher; None: it is not."""
    try:
        check_exact("teacher", read_served(path, "teacher.model"), TeacherConfig(model=path))
    except UserError as error:
        return str(error).replace(str(path), "MODEL")
    return None


def rope_of(raw: dict[str, Any]) -> str:
    """The type of rotary positions of a config.json, that of whole attention where they differ."""
    kinds = {str(rope_type(settings)) for settings in rope_settings(raw)}
    return next(iter(kinds - {"default"}), "default")


def missing_pairs(served: list[dict[str, Any]], limited: list[dict[str, Any]]) -> list[str]:
    """The architectures and types of rotary positions that are allowed and in no row."""
    found = {(row["architecture"], row["rope"]) for row in [*served, *limited]}
    return [
        f"{name} with rope type {kind}"
        for name, row in MEASURED.items()
        for kind in row.ropes
        if (name, kind) not in found
    ]


def said(row: dict[str, Any]) -> dict[str, Any]:
    """The row, shown as it comes."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row
