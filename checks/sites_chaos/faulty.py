"""Two sound sites, and sites that have keys of the run and lie."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from checks.sites_chaos.broken import held_back
from checks.sites_chaos.checks import Record, broken_promises
from checks.sites_chaos.liar import HONEST, KINDS, MODULE
from checks.sites_chaos.parties import Party, RunOver, code_of, write_config
from harness.case_rows import say
from sglang_bridge.ports import free_port

UPDATES, BATCH, SEED = 36, 24, 19
SOUND = ("near", "far")
SLOTS, SLOTS_OF_A_LIAR = 4, 8
DELAY_S = 2.0
ALL_SLOTS = SLOTS * len(SOUND) + SLOTS_OF_A_LIAR * len(KINDS)
QUARANTINE_AFTER = 3
BAD_INPUT = 2
BY_COMPARISON = ("below",)
"""Lies that no sample shows alone: some of such samples count before the sites are compared."""
MAY_PASS = {"zeros": QUARANTINE_AFTER}
"""Samples of a lie that is no lie of every sample: log-probs of 0 contradict a response only where
some token has more than one cached id. Others look like those of a student that is sure."""
Tree = dict[str, Any]


def with_liars(out: Path) -> Tree:
    """Make the run; return all counts, and in `broken` what does not hold."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    members = {name: {"concurrency": SLOTS, "scores": False} for name in SOUND}
    members |= {kind: {"concurrency": SLOTS_OF_A_LIAR, "scores": False} for kind in KINDS}
    sections: Tree = {
        "run": {"max_steps": UPDATES, "seed": SEED},
        "rollout": {"concurrency": ALL_SLOTS},
        "buffer": {"batch_size": BATCH},
    }
    sections |= held_back(DELAY_S)
    sections["sites"]["quarantine_after"] = QUARANTINE_AFTER
    config = write_config(out, free_port(), members, sections)
    began_s = time.monotonic()
    with ExitStack() as stack:
        party = Party(stack, out, config, [])
        sound = {name: party.site(name, party.keys(name), [HONEST], MODULE) for name in SOUND}
        codes: dict[str, int | None] = {}
        try:
            for name in SOUND:
                party.wait(lambda name=name: party.welcomes(name) > 0)
            liars = {kind: party.site(kind, party.keys(kind), [kind], MODULE) for kind in KINDS}
            for kind, liar in liars.items():
                party.wait(lambda liar=liar: liar.poll() is not None)
                codes[kind] = liar.returncode
                say(f"{kind} has ended with {liar.returncode}; updates: {party.made()}")
        except RunOver as over:
            say(str(over))
        codes["opd run"] = party.finish()
        codes |= {name: code_of(process) for name, process in sound.items()}
    record = Record.read(party.run_dir)
    members_told = record.summary.get("sites", {}).get("members", {})
    found = {
        "seconds": round(time.monotonic() - began_s, 1),
        "exit_codes": codes,
        "prompts": record.counts(),
        "liars": {
            kind: {
                **{key: members_told.get(kind, {}).get(key) for key in
                   ("state", "samples", "samples_refused", "starts", "lost")},
                "samples_trained_on": record.samples_by_site.get(kind, 0),
                "said": said_last(party.said(kind)),
                "tracebacks": party.said(kind).count("Traceback"),
            }
            for kind in KINDS
        },
        "sound": {name: members_told.get(name, {}) for name in SOUND},
    }  # fmt: skip
    return found | {"broken": broken(found, record)}


def said_last(text: str) -> list[str]:
    """Return the lines of a site from that of its error on."""
    lines = text.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("error:")), len(lines))
    return lines[first:]


def broken(found: Tree, record: Record) -> list[str]:
    """Return what is not as it should be."""
    wrong = broken_promises(record, UPDATES, BATCH, ALL_SLOTS)
    codes = dict.fromkeys(KINDS, BAD_INPUT) | dict.fromkeys(("opd run", *SOUND), 0)
    if found["exit_codes"] != codes:
        wrong.append(f"exit codes {found['exit_codes']}")
    for kind, told in found["liars"].items():
        if told["state"] != "quarantined":
            wrong.append(f"{kind} is {told['state']}, not quarantined")
        if len(told["said"]) != 1 or "is quarantined:" not in told["said"][0]:
            wrong.append(f"{kind} ended with other than one line that says why: {told['said']}")
        if told["tracebacks"]:
            wrong.append(f"{kind}: {told['tracebacks']} tracebacks")
        if kind in BY_COMPARISON:
            continue
        passed = told["samples_trained_on"] > MAY_PASS.get(kind, 0)
        if passed or (told["samples_refused"] or 0) < QUARANTINE_AFTER:
            wrong.append(f"{kind}: not counted, or trained on: {told}")
    for name, told in found["sound"].items():
        if told.get("state") == "quarantined" or told.get("samples_refused"):
            wrong.append(f"a sound site was found faulty: {name}")
        if not record.samples_by_site.get(name):
            wrong.append(f"no sample of {name}")
    return wrong
