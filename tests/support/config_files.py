"""Configuration files for tests of the schema alone; what they name need not exist."""

from pathlib import Path

import yaml

from megatron_opd.config.schema import Config

MINIMAL = {
    "data": {"train": "train.jsonl"},
    "student": {"model": "student"},
    "teacher": {"model": "teacher"},
}


def minimal(**sections: object) -> Config:
    """The shortest configuration, with these sections."""
    return Config.model_validate(MINIMAL | sections)


def write(tmp_path: Path, tree: object) -> Path:
    """A file that holds `tree`, or the text that it is."""
    path = tmp_path / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path
