"""Which sinks a run has, and what is checked before it starts."""

import json
from pathlib import Path

import pytest

from megatron_opd.checkpoint.run_dir import prepare_run_dir
from megatron_opd.config.load import dump_config
from megatron_opd.inputs.sinks import make_sinks, without_secrets
from megatron_opd.metrics.wandb_sink import INSTALL
from tests.support.cli_cases import call, refused, small_config
from tests.support.kept_states import make_config


@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_missing_package_is_one_line_before_anything_starts(
    capsys, tmp_path, models, monkeypatch, verb: str
):
    monkeypatch.setattr("megatron_opd.inputs.sinks.installed", lambda: False)
    tree = small_config(tmp_path, models) | {"metrics": {"wandb": {"project": "p"}}}
    refused(capsys, call(tmp_path, tree, verb=verb), "metrics.wandb", "megatron-opd[wandb]")
    assert not (tmp_path / "run" / "logs").exists()
    assert "megatron-opd[wandb]" in INSTALL


def test_a_directory_of_that_name_is_no_package(tmp_path: Path, monkeypatch):
    """W&B makes a directory `wandb` where it runs, which Python would import."""
    from importlib import metadata

    from megatron_opd.metrics.wandb_sink import installed

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metadata, "version", missing)
    assert not installed()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"wandb": {}}, ["metrics.wandb.project"]),
        ({"wandb": {"project": "a/b"}}, ["metrics.wandb.project", "a/b"]),
        ({"wandb": {"project": "p", "mode": "silent"}}, ["metrics.wandb.mode", "silent"]),
        ({"wandb": {"project": "p", "api_key": "x"}}, ["metrics.wandb.api_key", "unknown key"]),
        ({"names": "trl"}, ["metrics.names", "trl"]),
        ({"sinks": ["a:B", "a:B"]}, ["metrics.sinks", "each sink once"]),
    ],
)
def test_what_is_wrong_is_one_line(capsys, tmp_path, models, metrics, words):
    tree = small_config(tmp_path, models) | {"metrics": metrics}
    refused(capsys, call(tmp_path, tree, verb="check"), *words)


def test_the_first_sink_is_the_file_and_others_have_the_names_asked_for(tmp_path: Path):
    config = make_config(tmp_path, metrics={"names": "slime"})
    run_dir = prepare_run_dir(config.run.dir, config)
    sinks = make_sinks(config, run_dir, 0)
    for sink in sinks:
        sink.write(0, {"update": 0, "publish_s": 0.5})
        sink.close()
    assert json.loads(run_dir.metrics.read_text()) == {"update": 0, "publish_s": 0.5}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    assert set(events.Tags()["scalars"]) == {"train/update", "perf/update_weights_time"}


def test_what_leaves_the_machine_holds_no_secret(tmp_path: Path):
    given = [
        *("--hf-token", "SECRET1", "--ssl-keyfile-password=SECRET2", "--log-level", "info"),
        *("--max-prefill-tokens", "4096", "--tokenizer-mode", "auto", "--enable-key"),
    ]
    config = make_config(tmp_path, student={"extra_args": given})
    assert "SECRET1" in dump_config(config)
    shown = without_secrets(config.model_dump(mode="json"))
    assert shown["student"]["extra_args"] == [
        *("--hf-token", "(not shown)", "--ssl-keyfile-password=(not shown)", "--log-level"),
        *("info", "--max-prefill-tokens", "4096", "--tokenizer-mode", "auto", "--enable-key"),
    ]
    assert "SECRET" not in json.dumps(shown)
    assert shown["run"]["seed"] == config.run.seed
