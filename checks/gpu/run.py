"""A complete run on one GPU: two SGLang servers and the learner share it; the demo's models.

The settings for the GPU (bfloat16, SGLang's Triton attention, which takes heads of any size) have
not been run on one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from checks.gpu.process import LAST_LINES, echoed
from checks.gpu.record import PartFailed
from harness.run_dirs import summary_of
from sglang_bridge.server.launch import last_lines

CONFIG = "examples/arithmetic/demo.yaml"
DRY = (
    "run.max_steps=5",
    "buffer.batch_size=8",
    "rollout.max_new_tokens=16",
    "evaluation.problems=0",
)
ON_GPU = (
    "cluster.share_gpus=true",
    "run.max_steps=20",
    "evaluation.problems=64",
    "learner.dtype=bfloat16",
    *(
        f"{role}.{setting}"
        for role in ("student", "teacher")
        for setting in (
            "dtype=bfloat16",
            "mem_fraction_static=0.2",
            'extra_args=["--attention-backend", "triton"]',
        )
    ),
)
END_S = 25.0  # in which an interrupted run ends what it started
MISMATCH = ("mismatch_", "probs_diff_")  # learner against sampler
KEPT = (
    "status",
    "cause",
    "updates",
    "student_accuracy_before_pct",
    "student_accuracy_after_pct",
    "teacher_accuracy_pct",
    "train_tokens_per_s",
    "overlap",
    "train_s_mean",
    "publish_s_mean",
    "rollout_s_mean",
    "score_s_mean",
    "distinct_ids_per_token",
    "wall_s",
)


def measure(limit_s: float, *, dry: bool) -> dict[str, Any]:
    """What summary.json says of it. Raises PartFailed, with the ends of the logs, otherwise."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "megatron_opd", "run", CONFIG]
        for setting in (f"run.dir={run_dir}", *(DRY if dry else ON_GPU)):
            command += ["--set", setting]
        exit_code, said = echoed(command, max(1.0, limit_s - END_S))
        found = summary_of(run_dir)
        figures = {key: found.get(key) for key in KEPT}
        figures |= {key: found[key] for key in found if key.startswith(MISMATCH)}
        if exit_code != 0:
            logs = sorted((run_dir / "logs").glob("*.log"))
            figures["output"] = list(said)
            figures["logs"] = {log.name: last_lines(log, LAST_LINES).splitlines() for log in logs}
            last = said[-1] if said else "no output"
            raise PartFailed(f"opd run ended with exit code {exit_code}: {last}", figures)
    return figures
