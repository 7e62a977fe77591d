"""What the programs of this example share. Imports nothing, so that `demo.py` stays small."""

from __future__ import annotations

from pathlib import Path

BUILD, RUN = Path("build/smollm2"), Path("runs/demo-real")
"""Where the models and the run are written; distil.yaml names the same places."""

REMOVED_LAYERS = (10, 24)
"""Layers of the teacher, counted from 0, that the student lacks."""
