"""`python -m benchmarks [NAME ...]`: run benchmarks or studies, print one JSON object for each."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from typing import Any

from megatron_opd.metrics.summary import commit, versions

BENCHMARKS = ("draws", "learner", "lean_logp")
# Minutes to hours: run when named.
STUDIES = (
    "variance",
    "convert",
    "layouts",
    "objectives",
    "mismatch",
    "staleness",
    "routing",
    "resume",
    "ratios",
    "guard",
    "checkpoint",
    "noticing",
    "step",
    "fuzz",
)
WITH_OPTIONS = ("step", "mismatch", "staleness", "fuzz", "noticing")
NAMES = (*BENCHMARKS, *STUDIES)


def machine() -> dict[str, Any]:
    """What a reader needs to know to compare."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        models = [line.partition(":")[2].strip() for line in cpuinfo if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parsed, options = parser.parse_known_args()
    names = parsed.names or BENCHMARKS
    for name in names:
        if name not in NAMES:
            parser.error(f"unknown benchmark {name!r}; choices: {', '.join(NAMES)}")
    if options and not (len(names) == 1 and names[0] in WITH_OPTIONS):
        parser.error(f"unknown options {options}: only {', '.join(WITH_OPTIONS)} alone takes any")
    for name in names:
        measure = importlib.import_module(f"benchmarks.{name}").measure
        figures = measure(options) if options else measure()
        header = {
            "benchmark": name,
            "command": " ".join(["python -m benchmarks", name, *options]),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
        }
        print(json.dumps(header | figures, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
