"""Held-out sets as a user writes them, and how each is evaluated."""

from pathlib import Path

import pytest

from megatron_opd.config.evaluation import reported_ks
from megatron_opd.config.load import ConfigError, dump_config, load_config
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL, minimal, write


def of(heldout: object, **evaluation: object) -> Config:
    return minimal(data={**MINIMAL["data"], "heldout": heldout}, evaluation=evaluation)


def test_a_file_alone_is_one_set() -> None:
    config = of("there.jsonl", problems=7)
    assert list(config.heldout) == ["heldout"]
    settings = config.heldout["heldout"]
    assert (settings.file, settings.problems, settings.samples) == (Path("there.jsonl"), 7, 4)
    assert (settings.temperature, settings.max_new_tokens) == (1.0, 1024)
    assert config.best_set == settings
    assert of(None).heldout == {}
    assert of(None).best_set is None
    assert of("there.jsonl", problems=0).heldout == {}


def test_a_set_differs_where_it_says_so(tmp_path: Path) -> None:
    own = {"file": "b", "problems": 30, "samples": 16, "temperature": 0, "max_new_tokens": 9}
    config = of({"a": "a", "b": own, "c": {"file": "c"}}, max_new_tokens=5, best_set="b")
    a, b, c = config.heldout.values()
    assert (a.file, a.problems, a.samples, a.max_new_tokens) == (Path("a"), 64, 4, 5)
    assert (b.file, b.problems, b.samples) == (Path("b"), 30, 16)
    assert (b.temperature, b.max_new_tokens) == (0, 9)
    assert c.temperature == 1
    assert config.best_set == b
    assert load_config(Config, write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.heldout={a: {file: x, problms: 3}}", ["data.heldout.a.problms", "heldout.a.probl"]),
        ("data.heldout={a: {problems: 3}}", ["missing key 'data.heldout.a.file'"]),
        ("data.heldout={a: {file: x, samples: 0}}", ["data.heldout.a.samples", "got 0"]),
        ("data.heldout={'a b': x}", ["data.heldout", "letters, digits", "got 'a b'"]),
        ("data.heldout={'a/b': x}", ["data.heldout", "got 'a/b'"]),
        ("data.heldout={3: x}", ["data.heldout", "got '3'"]),
        ("data.heldout=[x]", ["data.heldout"]),
        ("data.heldout=' '", ["data.heldout", "must name a file"]),
        ("evaluation.best_metric=pass", ["evaluation.best_metric", "pass@4", "got 'pass'"]),
        ("evaluation.best_metric=pass@0", ["evaluation.best_metric", "got 'pass@0'"]),
        ("evaluation.every=-1", ["evaluation.every", "-1"]),
        ("evaluation.concurrency=0", ["evaluation.concurrency", "got 0"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, write(tmp_path, MINIMAL), [override])
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "ks"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (7, (1, 2, 4, 7))],
)
def test_pass_at_k_is_reported_for_powers_of_two(samples: int, ks: tuple[int, ...]) -> None:
    assert reported_ks(samples) == ks
