"""Runs in a Ray cluster what `opd run` has submitted (ray_submit.py), as a program of its own."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from megatron_opd.launch.ray_submit import JOB_VARIABLE

EXIT_BAD_INPUT = 2


def main() -> int:
    """Run `opd run` with the submitted configuration."""
    job = json.loads(os.environ.pop(JOB_VARIABLE))
    if job["directory"] is not None:
        try:
            os.chdir(job["directory"])
        except OSError as error:
            what = f"must be a directory on the cluster's head node, got {error.filename}"
            print(f"error: cluster.ray.directory {what}: {error.strerror}", file=sys.stderr)  # noqa: T201
            return EXIT_BAD_INPUT
    with tempfile.TemporaryDirectory(prefix="opd-job-") as directory:
        config = Path(directory) / job["name"]
        config.write_text(job["config"], encoding="utf-8")
        sys.argv = ["opd", "run", str(config), *job["arguments"]]
        runpy.run_module("megatron_opd", run_name="__main__")  # leaves by SystemExit
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
