"""Configuration files for tests of the schema alone; what they name need not exist."""

from pathlib import Path

import yaml

MINIMAL = {
    "data": {"train": "train.jsonl"},
    "student": {"model": "student"},
    "teacher": {"model": "teacher"},
}


def write(tmp_path: Path, tree: object) -> Path:
    """A file that holds `tree`, or the text that it is."""
    path = tmp_path / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path
