"""`python -m benchmarks [NAME ...]`: run benchmarks or studies, print one JSON object for each."""

from __future__ import annotations

import argparse
import importlib
import json

from benchmarks.grid.tree import DirtyTree
from benchmarks.header import header

BENCHMARKS = ("draws", "draw_step", "expert_rows", "learner", "lean_logp")
# Minutes to hours: run when named.
STUDIES = (
    "variance",
    "published",
    "convert",
    "layouts",
    "routing",
    "resume",
    "ratios",
    "guard",
    "health",
    "checkpoint",
    "noticing",
    "step",
    "weight_sync",
    "weight_sync_disk",
    "sync_layouts",
    "sync_relay",
    "sync_chaos",
    "fault_schedules",
    "schedule_properties",
    "chaos",
    "elastic",
    "mismatch_grid",
    "fuzz",
    "gpu",
    "slurm",
    "launchers",
    "schedules",
    "calibration",
    "simulator",
    "verifiers",
    "watch",
    "security",
    "data_path",
    "data_workers",
    "many_engines",
    "handing_out",
    "stalls",
    "narrow",
    "gepo",
    "packing",
    "watched_demo",
    "bring",
    "beside_trl",
    "plain_step",
    "rounding",
    "link",
    "delays_study",
    "sites_simulator",
    "two_sites",
    "sites_chaos",
    "findings",
    "prefixes",
    "first_update",
    "prompt_files",
)
WITH_OPTIONS = (
    "step",
    "weight_sync",
    "sync_layouts",
    "sync_chaos",
    "fault_schedules",
    "schedule_properties",
    "chaos",
    "elastic",
    "mismatch_grid",
    "launchers",
    "fuzz",
    "noticing",
    "gpu",
    "slurm",
    "schedules",
    "simulator",
    "watch",
    "security",
    "data_path",
    "data_workers",
    "many_engines",
    "stalls",
    "narrow",
    "packing",
    "watched_demo",
    "bring",
    "beside_trl",
    "plain_step",
    "rounding",
    "link",
    "delays_study",
    "sites_simulator",
    "two_sites",
    "sites_chaos",
    "findings",
    "prefixes",
    "first_update",
    "prompt_files",
)
NAMES = (*BENCHMARKS, *STUDIES)


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
    failed = False
    for name in names:
        measure = importlib.import_module(f"benchmarks.{name}").measure
        try:
            figures = measure(options) if options else measure()
        except DirtyTree as error:
            parser.error(f"{name}: {error}")
        print(json.dumps(header(name, options) | figures, indent=2), flush=True)
        failed = failed or bool(figures.get("failed"))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
