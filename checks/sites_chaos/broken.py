"""Two sites whose links break and harm what they carry; one of them is killed again and again."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from checks.link.proxy import Proxy
from checks.sites_chaos.checks import Record, broken_promises
from checks.sites_chaos.harmed import MODULE, faults_told, harmed
from checks.sites_chaos.parties import Party, RunOver, code_of, proxied, write_config
from harness.case_rows import say
from sglang_bridge.ports import free_port

UPDATES, BATCH, SEED = 44, 24, 18
NEAR, FAR = "near", "far"
MEMBERS = {NEAR: {"concurrency": 4}, FAR: {"concurrency": 4, "scores": False}}
SLOTS = 8
DELAY_S = 2.0
"""Samples are held back so long, that the run outlasts its kills."""
KILLS, CUTS = 10, 20
MOST_BYTES_TO_A_CUT = 3_000_000
FAULTS, FLIPS = 0.05, 0.005
"""Shares: of chunks that a process harms, of blocks of 16 KiB of which a bit is flipped."""
LONGEST_LIFE_S = 8.0
LEAST_VERSIONS = 5
Tree = dict[str, Any]


def with_everything(out: Path) -> Tree:
    """Make the run; return all counts, and in `broken` what does not hold."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    port, luck = free_port(), random.Random(SEED)
    config = write_config(
        out,
        port,
        MEMBERS,
        {
            "run": {"max_steps": UPDATES, "seed": SEED},
            "rollout": {"concurrency": SLOTS},
            "buffer": {"batch_size": BATCH},
        }
        | held_back(DELAY_S),
    )
    proxies = {name: _proxy(port, luck.randrange(1 << 30)) for name in MEMBERS}
    began_s = time.monotonic()
    with ExitStack() as stack:
        addresses = {name: stack.enter_context(proxied(proxies[name])) for name in MEMBERS}
        told = {"learner": [out / "learner.faults"]}
        party = Party(stack, out, config, harmed(FAULTS, 0, told["learner"][0]), MODULE)
        keys = {name: party.keys(name, addresses[name]) for name in MEMBERS}

        def start(name: str) -> subprocess.Popen[bytes]:
            files = told.setdefault(name, [])
            files.append(out / f"{name}-{len(files)}.faults")
            words = harmed(FAULTS, luck.randrange(1 << 30), files[-1])
            return party.site(name, keys[name], words, MODULE)

        near, far = start(NEAR), start(FAR)
        kills = servers = 0
        try:
            for number in range(1, KILLS + 1):
                party.wait(lambda number=number: party.welcomes(FAR) >= number)
                moment_s = time.monotonic() + luck.uniform(0.0, LONGEST_LIFE_S)
                party.wait(lambda moment_s=moment_s: time.monotonic() >= moment_s)
                servers += party.kill(far)
                kills += 1
                say(f"killed {number} times; updates: {party.made()}")
                far = start(FAR)
        except RunOver as over:
            say(str(over))
        code = party.finish()
        codes = {"opd run": code} | {
            name: code_of(each) for name, each in ((NEAR, near), (FAR, far))
        }
        left = party.left()
    record = Record.read(party.run_dir)
    found = {
        "seconds": round(time.monotonic() - began_s, 1),
        "exit_codes": codes,
        "kills": kills,
        "processes_of_killed_sites": servers,
        "processes_left": left,
        "cuts": {name: proxy.cuts for name, proxy in proxies.items()},
        "bits_flipped_under_way": {name: proxy.flips for name, proxy in proxies.items()},
        "mib_through_the_proxies": round(sum(p.forwarded for p in proxies.values()) / 2**20, 1),
        "faults_below_the_encryption": {
            name: dict(sum((Counter(faults_told(file)) for file in files), Counter[str]()))
            for name, files in told.items()
        },
        "tracebacks": sum(party.said(name).count("Traceback") for name in ("learner", *MEMBERS)),
        "prompts": record.counts(),
        "sites": record.summary.get("sites", {}),
        "counted_by_sites": {name: counts_of(party.run_dir, name) for name in MEMBERS},
    }
    return found | {"broken": broken(found, record), "control": control(record)}


def held_back(delay_s: float) -> Tree:
    """Return the section of sites that holds every sample back for so long."""
    return {"sites": {"sample_delays": {"type": "constant", "low_s": delay_s, "high_s": delay_s}}}


def counts_of(run_dir: Path, name: str) -> Tree:
    """Return counts.json of a site's last process; empty: it wrote none."""
    path = run_dir / "sites" / name / "counts.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def broken(found: Tree, record: Record) -> list[str]:
    """Return what is not as it should be."""
    wrong = broken_promises(record, UPDATES, BATCH, SLOTS)
    if found["exit_codes"] != {"opd run": 0, NEAR: 0, FAR: 0}:
        wrong.append(f"exit codes {found['exit_codes']}")
    if found["processes_left"] or found["tracebacks"]:
        wrong.append(f"left {found['processes_left']}, {found['tracebacks']} tracebacks")
    if found["kills"] < KILLS or sum(found["cuts"].values()) < CUTS:
        wrong.append(f"{found['kills']} kills, {found['cuts']} cuts: too few")
    for name, done in found["faults_below_the_encryption"].items():
        if not all(done.get(kind) for kind in ("damaged", "repeated", "replayed", "lost")):
            wrong.append(f"{name} did not do every fault: {done}")
    if set(record.samples_by_site) != set(MEMBERS):
        wrong.append(f"samples of {record.samples_by_site}")
    if len(record.versions) < LEAST_VERSIONS:
        wrong.append(f"samples of the versions {record.versions} alone")
    for name, told in found["sites"].get("members", {}).items():
        if told["samples_refused"] or told["state"] == "quarantined":
            wrong.append(f"a sound site was found faulty: {name}")
        if not told["chunks_refused"]:
            wrong.append(f"no chunk of {name} was refused")
    if found["sites"] and found["sites"]["members"][FAR]["starts"] != found["kills"] + 1:
        wrong.append(f"{found['sites']['members'][FAR]['starts']} starts of {FAR}")
    for name, told in found["counted_by_sites"].items():
        if not told or told["weights_refused"] or told["records_refused"]:
            wrong.append(f"{name} refused weights or records, or counted nothing: {told}")
    return wrong


def control(record: Record) -> Tree:
    """Return what is found in records of this run that were spoilt: each must break a promise."""
    trained = list(record.trained)
    if not trained:
        return {}
    first = trained[0]
    other, gone = trained[-1] | {"uid": first["uid"]}, first | {"drop_reason": "nothing"}
    spoilt = {
        "one sample removed": replace(record, trained=trained[1:]),
        "one sample twice": replace(record, trained=[*trained, first]),
        "one sample in the place of another": replace(record, trained=[*trained[:-1], other]),
        "one drop without a count": replace(
            record, trained=trained[1:], dropped=[*record.dropped, gone]
        ),
    }
    return {name: broken_promises(each, UPDATES, BATCH, SLOTS) for name, each in spoilt.items()}


def _proxy(port: int, seed: int) -> Proxy:
    chance = random.Random(seed)
    return Proxy(
        port,
        cut_after=lambda: chance.randint(1, MOST_BYTES_TO_A_CUT),
        flip=FLIPS,
        chance=random.Random(seed + 1),
    )
