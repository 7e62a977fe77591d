"""Strict configuration: every mistake is one line that names the key, the rule and the value."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.config.estimator import Estimator
from megatron_opd.config.load import ConfigError, dump_config, load_config
from megatron_opd.config.objectives import ForwardKl, ReverseKl
from megatron_opd.config.schema import Config
from tests.support.config_files import MINIMAL, write


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, path, overrides)
    message = str(caught.value)
    assert "\n" not in message, "one line for the terminal"
    return message


def test_defaults_fill_in_and_the_dump_loads_to_an_equal_config(tmp_path: Path):
    config = load_config(Config, write(tmp_path, MINIMAL))
    assert config.schedule.permits(config.buffer.batch_size) == 2 * config.buffer.batch_size
    assert load_config(Config, write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("buffr.batch_size=3", ["unknown key 'buffr'", "'buffer'"]),
        ("rollout.temprature=1", ["unknown key 'rollout.temprature'", "'rollout.temperature'"]),
        ("learner.parallel.tq=2", ["unknown key 'learner.parallel.tq'", "'learner.parallel.tp'"]),
        ("rollout.temperature=0", ["rollout.temperature", "0.01", "got 0"]),
        ("rollout.temperature=-1", ["rollout.temperature", "0.01", "got -1"]),
        ("rollout.temperature=.nan", ["rollout.temperature", "finite"]),
        ("learner.optimizer.x={a: [1, .nan]}", ["learner.optimizer.x.a.1", "finite"]),
        ("objective={type: gepo, clip: .nan}", ["objective.clip", "finite"]),
        ("rollout.top_p=0", ["rollout.top_p", "greater than 0"]),
        ("support.m=0", ["support.m", "greater than or equal to 1", "got 0"]),
        ("support.m=65", ["support.m", "less than or equal to 64", "got 65"]),
        ("support.m=3.5", ["support.m", "3.5"]),
        ("support.type=topkk", ["support.type", "mc, path, topk", "'topkk'", "mean 'topk'"]),
        ("support={type: path, m: 3}", ["support.m", "type path"]),
        ("objective.type=grop", ["objective.type", "'grop'", "mean 'grpo'"]),
        ("objective={type: jsd, beta: 1}", ["objective.beta", "less than 1", "got 1"]),
        ("objective={type: jsd, alpha: 1}", ["objective.alpha", "type jsd", "beta"]),
        ("objective={trust: {type: clip, dual: 1}}", ["objective.trust.dual", "greater than 1"]),
        ("correction={type: truncated, cap: 2}", ["correction.cap", "max_ratio"]),
        ("correction={type: masked, min_ratio: 3}", ["min_ratio", "max_ratio=2.0"]),
        (
            "reduction.type=sum",
            ["reduction.type", "token_mean, sequence_mean, fixed_length", "'sum'"],
        ),
        ("reduction.type=token", ["reduction.type", "'token' is now 'token_mean'"]),
        ("run.updates=5", ["'run.updates'", "it is now 'run.max_steps'"]),
        ("learner.mini_batches=2", ["'learner.mini_batches'", "'learner.num_mini_batches'"]),
        ("learner.optimizer.schedule=cosine", ["learner.optimizer: schedule is now lr_scheduler"]),
        ("schedule.max_staleness=-1", ["schedule.max_staleness", "-1"]),
        ("learner.dtype=fp8", ["learner.dtype", "fp8"]),
        (
            "learner.routing_compare_every=2",
            ["learner: routing_compare_every must be 0 unless", "rollout, got 2 and off"],
        ),
        (
            "learner={routing_replay: current, routing_compare_every: 1}",
            ["routing_compare_every", "unless routing_replay is rollout, got 1 and current"],
        ),
        (
            "learner.routing_weights=sampler",
            [
                "learner: routing_weights must be learner unless routing_replay is rollout",
                "got sampler and off: the sampler's weights",
                "so set routing_replay: rollout too",
            ],
        ),
        (
            "learner={routing_replay: current, routing_weights: sampler}",
            ["routing_weights must be learner unless", "got sampler and current"],
        ),
        (
            "learner.routing_weights=both",
            ["learner.routing_weights", "'learner' or 'sampler'", "both"],
        ),
        ("learner.routing_compare_every=-1", ["learner.routing_compare_every", "got -1"]),
        ("learner.parallel.tp=0", ["learner.parallel.tp", "got 0"]),
        ("student.base_port=70000", ["student.base_port", "70000"]),
        ("learner.optimizer.min_lr=1", ["min_lr", "lr", "1.0"]),
        ("data=3", ["data"]),
        ("=3", ["--set"]),
        ("rollout.temperature", ["--set", "key=value"]),
        ("data.train.x=3", ["not a section"]),
        ("data.train=[", ["--set data.train", "YAML"]),
    ],
)
def test_each_mistake_names_key_rule_and_value(tmp_path: Path, override: str, words: list[str]):
    message = error_of(write(tmp_path, MINIMAL), override)
    for word in words:
        assert word in message


def test_rules_across_sections_name_all_their_keys(tmp_path: Path):
    message = error_of(
        write(tmp_path, MINIMAL),
        "buffer.batch_size=6",
        "learner.num_mini_batches=2",
        "learner.parallel={ep: 2, dp: 4}",
    )
    for word in ("buffer.batch_size", "learner.num_mini_batches", "learner.parallel", "6", "4"):
        assert word in message


def test_missing_key_file_and_broken_yaml(tmp_path: Path):
    assert "missing key 'teacher'" in error_of(
        write(tmp_path, {"data": MINIMAL["data"], "student": MINIMAL["student"]})
    )
    assert "not found" in error_of(tmp_path / "nowhere.yaml")
    assert "not valid YAML" in error_of(write(tmp_path, "a: [1"))
    assert "mapping" in error_of(write(tmp_path, "- 1"))
    duplicate = "data: {train: a}\ndata: {train: b}\n"
    message = error_of(write(tmp_path, duplicate))
    assert "given twice" in message
    assert ":2:" in message


def test_override_creates_sections_and_parses_yaml(tmp_path: Path):
    config = load_config(
        Config, write(tmp_path, MINIMAL), ["learner.optimizer.lr=3e-4", "data.heldout=null"]
    )
    assert config.learner.optimizer.lr == pytest.approx(3e-4)
    assert config.data.heldout == {}


def test_config_is_frozen(tmp_path: Path):
    config = load_config(Config, write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.buffer.batch_size = 3


def test_the_estimator_is_validated_once_a_config_and_anew_for_a_changed_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    validated: list[object] = []
    validate = Estimator.model_validate
    monkeypatch.setattr(
        Estimator, "model_validate", lambda tree: (validated.append(tree), validate(tree))[1]
    )
    path = write(tmp_path, MINIMAL | {"support": {"type": "mc", "m": 37}})
    config = load_config(Config, path)
    fresh = config.model_copy()
    dumped = dump_config(config)
    assert config.estimator is config.estimator
    assert len(validated) == 1
    assert (config, dict(config), dump_config(config)) == (fresh, dict(fresh), dumped)
    assert config.estimator.support == config.support
    changed = config.model_copy(update={"objective": ForwardKl()})
    assert changed.estimator.objective == ForwardKl()
    assert config.estimator.objective == ReverseKl()
    assert len(validated) == 2


@settings(deadline=None)
@given(
    batch=st.integers(1, 64),
    minis=st.integers(1, 4),
    dp=st.integers(1, 8),
)
def test_batch_rule_accepts_equal_mini_batches_with_a_sample_for_every_rank(
    batch: int, minis: int, dp: int
):
    tree = {
        **MINIMAL,
        "buffer": {"batch_size": batch},
        "learner": {"num_mini_batches": minis, "parallel": {"dp": dp}},
    }
    if batch % minis or batch // minis < dp:
        with pytest.raises(ValueError, match="multiple of" if batch % minis else "a sample for"):
            Config.model_validate(tree)
    else:
        assert Config.model_validate(tree).learner.parallel.dp == dp


@pytest.mark.parametrize(("written", "guard"), [("off", "off"), ("'off'", "off"), ("warn", "warn")])
def test_the_guard_can_be_switched_off_as_its_error_says(tmp_path: Path, written: str, guard: str):
    """Before: got False."""
    path = write(tmp_path, MINIMAL)
    assert load_config(Config, path, [f"scoring.guard={written}"]).scoring.guard == guard


def test_a_server_is_not_student_and_teacher(tmp_path: Path):
    """Before: the student's weights were sent to the teacher too."""
    both = [f"{role}.urls=['http://127.0.0.1:1/']" for role in ("student", "teacher")]
    message = error_of(write(tmp_path, MINIMAL), *both)
    assert "student.urls and teacher.urls must name different servers" in message
    assert "got http://127.0.0.1:1 in both" in message


def test_a_password_in_a_url_is_refused_and_not_shown(tmp_path: Path):
    message = error_of(write(tmp_path, MINIMAL), "student.urls=['http://me:secret@h:1']")
    assert "student.urls: each url must be http(s)://HOST:PORT" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "override",
    [
        "student.urls=[LONG]",
        "student.urls=[http://u:p@LONG]",
        "student.urls=['http://LONG:1','http://LONG:1']",
        "cluster.ray.address=LONG",
        "cluster.ray.submit=LONG",
        "learner.megatron.recompute_modules=LONG",
        "LONG=1",
        "teachers.LONG.model=x",
        "run.dir=LONG",
        'run.dir="LONG\\0"',
        "schedule={type: verl, partial_rollout: LONG}",
        "objective.type=LONG",
    ],
)
def test_a_refusal_is_short_whatever_it_refuses(tmp_path: Path, override: str):
    """Before: a URL of 5,000 characters was on the terminal whole."""
    text = error_of(write(tmp_path, MINIMAL), override.replace("LONG", "9x" * 2500))
    assert len(text) < 1000


def test_half_a_character_is_refused(tmp_path: Path):
    message = error_of(write(tmp_path, MINIMAL), 'run.dir="\\ud800"')
    assert "run.dir: must contain whole characters" in message
