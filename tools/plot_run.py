"""Draw one run: learning and staleness over its updates.

    python tools/plot_run.py RUN_DIR OUT.png

Reads metrics.jsonl and summary.json; everything drawn is in those files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> int:
    """Entry point."""
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    updates = [row["update"] + 1 for row in rows]
    figure, (learning, accuracy) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    learning.plot(updates, [row["reverse_kl_nats"] for row in rows], color="#3b82f6")
    learning.set(
        xlabel="learner update", ylabel="nats per token", title="reverse KL to the teacher", ylim=0
    )
    rewards = [100 * row["reward_mean"] for row in rows]
    accuracy.plot(updates, rewards, color="#93c5fd", label="its rollouts (train)")
    held_out = [summary["student_accuracy_before_pct"], summary["student_accuracy_after_pct"]]
    accuracy.plot(
        [0, updates[-1]], held_out, "o", color="#1d4ed8", label="student, held out (avg@4)"
    )
    teacher = summary["teacher_accuracy_pct"]
    accuracy.axhline(teacher, color="#d97706", label="teacher, held out (avg@4)")
    accuracy.set(xlabel="learner update", ylabel="% right", title="accuracy", ylim=(0, 104))
    accuracy.legend(frameon=False, loc="lower right", fontsize="small")
    for axes in (learning, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
