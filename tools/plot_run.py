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
    bars = {
        "student\nbefore": ("student_accuracy_before_pct", "#9ca3af"),
        "student\nafter": ("student_accuracy_after_pct", "#3b82f6"),
        "teacher": ("teacher_accuracy_pct", "#d97706"),
    }
    drawn = accuracy.bar(
        list(bars), [summary[key] for key, _ in bars.values()], color=[c for _, c in bars.values()]
    )
    accuracy.bar_label(drawn, fmt="%.1f")
    accuracy.set(ylabel="held-out avg@4, %", ylim=(0, 109), title="accuracy through SGLang")
    for axes in (learning, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
