"""Record a run of `make demo`: its summary, the machine and the seconds of set-up, as JSON.

make demo                                          # in a fresh clone; it prints the seconds
python tools/record_demo.py runs/demo SETUP_S > benchmarks/results/demo.json
python tools/plot_run.py runs/demo docs/demo.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.header import machine
from megatron_opd.metrics.summary import commit


def main() -> int:
    """Entry point."""
    summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
    header = {"benchmark": "demo", "command": "make demo (fresh clone)", "machine": machine()}
    recorded = header | {"setup_s": float(sys.argv[2])} | {"commit": commit()} | summary
    print(json.dumps(recorded, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
