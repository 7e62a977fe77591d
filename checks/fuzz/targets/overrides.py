"""`--set KEY=VALUE` on the command line."""

from __future__ import annotations

from random import Random

from checks.fuzz.engine import Target
from checks.fuzz.mutations import NUMBERS, TEXTS, damaged_bytes, one_of
from checks.fuzz.places import EXAMPLE, scratch
from megatron_opd.config.load import ConfigError, dump_config, load_config
from megatron_opd.config.schema import Config

DEMO = EXAMPLE / "demo.yaml"
CORPUS = (
    *(b"run.max_steps=5", b"rollout.temperature=0.5", b"objective={type: jsd, beta: 0.3}"),
    *(b"learner.parallel={tp: 2, pp: 2}", b"student.urls=['http://a:1']", b"run.seed=1_000"),
    *(
        b"support={type: atoms_tail, k: 16, m: 48}",
        b"data.heldout=null",
        b"evaluation.temperature=0",
    ),
)
KEYS = (
    "run.max_steps",
    "rollout.temperature",
    "student.host",
    "learner.threads",
    "data",
    "",
    "a.b.c",
)


def call(override: str) -> Config:
    """Apply it to the demo."""
    return load_config(Config, DEMO, [override])


def oracle(override: str, config: Config) -> str | None:
    """What a loaded configuration dumps to is the same configuration."""
    again = scratch() / "dumped.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    return None if load_config(Config, again) == config else "the dump is another configuration"


BYTES = damaged_bytes(CORPUS)


def damaged(rng: Random) -> str:
    """A valid override, damaged."""
    return BYTES(rng).decode("utf-8", "surrogateescape")


def assigned(rng: Random) -> str:
    """A key and a value that its schema does not expect."""
    return f"{rng.choice(KEYS)}={rng.choice((*TEXTS, *map(repr, NUMBERS)))}"


TARGET = Target("overrides", one_of(damaged, assigned), call, (ConfigError,), oracle)
