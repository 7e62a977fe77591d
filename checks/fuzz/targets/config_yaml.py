"""A run's configuration file -> a validated config."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import yaml

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, damaged_tree, one_of
from checks.fuzz.places import scratch, written
from harness.tree import ROOT
from megatron_opd.config.load import ConfigError, dump_config, load_config
from megatron_opd.config.schema import Config

NAMES = ("arithmetic/demo.yaml", "rewards/gepo.yaml", "cluster/four_nodes/config.yaml")
CORPUS = [(ROOT / "examples" / name).read_bytes() for name in NAMES]
# Normalised on purpose: a bare `off` is false in YAML 1.1; URLs lose a trailing slash.
NORMALISED = ("routing_replay", "urls", "train", "heldout")


def call(data: bytes) -> Config:
    """Load the file."""
    return load_config(Config, written("config.yaml", data))


def oracle(data: bytes, config: Config) -> str | None:
    """Every value kept its type, no key is lost, and the dump is the same configuration."""
    try:
        raw = yaml.safe_load(data.decode("utf-8"))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        return f"PyYAML refuses it: {type(error).__name__}"
    dumped = config.model_dump(mode="json")
    again = scratch() / "again.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    if load_config(Config, again) != config:
        return "the dump is another configuration"
    json.dumps(dumped, allow_nan=False)
    return changed(raw, dumped)


def changed(raw: Any, kept: Any, key: str = "") -> str | None:
    """The first value of the file that the configuration holds as something else."""
    if isinstance(raw, dict) and isinstance(kept, dict):
        for name, value in raw.items():
            if name not in kept:
                return f"the key {name!r} is lost"
            if name not in NORMALISED and (found := changed(value, kept[name], str(name))):
                return found
        return None
    if isinstance(raw, list) and isinstance(kept, list):
        lost = len(raw) != len(kept)
        pairs = (changed(a, b, key) for a, b in zip(raw, kept, strict=False))
        return f"items of {key} are lost" if lost else next((p for p in pairs if p), None)
    if isinstance(kept, float) and type(raw) is int:
        raw = float(raw)  # the nearest there is
    if key == "correction" and raw is None:
        return None  # the default of the objective and the sampler
    same_kind = type(raw) is type(kept)
    if same_kind and raw == kept:
        return None
    # YAML 1.1 reads 1e3 as text, and `1:30`, dates and octals as numbers: ours is stricter
    if isinstance(raw, str) and isinstance(kept, float) and _float(raw) == kept:
        return None
    if isinstance(kept, str) and not isinstance(raw, bool | float | int | None | dict | list):
        return None
    return f"{key}: {type(raw).__name__} became {type(kept).__name__}"


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


TREES = damaged_tree([yaml.safe_load(data) for data in CORPUS])


def as_yaml(rng: Random) -> bytes:
    """A damaged tree as a file."""
    return yaml.safe_dump(TREES(rng)).encode("utf-8", "surrogatepass")


TARGET = Target(
    "config_yaml",
    one_of(as_yaml, as_yaml, damaged_bytes(CORPUS)),
    call,
    (ConfigError,),
    oracle,
    share=2,
)
