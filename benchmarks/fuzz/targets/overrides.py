"""`--set KEY=VALUE` on the command line."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.fuzz.engine import Target
from benchmarks.fuzz.mutations import HOSTILE_TEXTS, damaged_bytes
from benchmarks.fuzz.places import EXAMPLE
from benchmarks.fuzz.targets import config_yaml
from megatron_opd.config.load import ConfigError, load_config
from megatron_opd.config.schema import Config

DEMO = EXAMPLE / "demo.yaml"
CORPUS = (
    *(b"run.updates=5", b"rollout.temperature=0.5", b"objective={type: jsd, beta: 0.3}"),
    *(b"learner.parallel={tp: 2, pp: 2}", b"student.urls=['http://a:1']", b"run.seed=1_000"),
    *(
        b"support={type: atoms_tail, k: 16, m: 48}",
        b"data.heldout=null",
        b"evaluation.temperature=0",
    ),
)
KEYS = (
    "run.updates",
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
    return config_yaml.oracle(DEMO.read_bytes(), config) if not override else _round_trip(config)


def _round_trip(config: Config) -> str | None:
    return None if Config.model_validate(config.model_dump()) == config else "the dump is another"


TARGET = Target(
    "overrides",
    st.one_of(
        damaged_bytes(CORPUS).map(lambda data: data.decode("utf-8", "surrogateescape")),
        st.tuples(st.sampled_from(KEYS), st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=30)).map(
            "=".join
        ),
    ),
    call,
    (ConfigError,),
    oracle,
)
