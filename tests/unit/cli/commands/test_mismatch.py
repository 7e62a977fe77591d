"""`opd mismatch`: its options, what it refuses before anything starts, tables and plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron_opd.config.learner import LearnerConfig
from megatron_opd.config.schema import Config
from megatron_opd.errors import PartGone
from megatron_opd.metrics.sinks import write_json
from megatron_opd.mismatch import run as mismatch_run
from megatron_opd.mismatch.measure import (
    DECODE,
    FREE,
    GATED,
    PREFILL,
    REPLAYED,
    MeasuredMismatch,
    RoutingGap,
)
from megatron_opd.mismatch.options import Options
from megatron_opd.mismatch.plot import draw
from megatron_opd.mismatch.report import figures_of, tables
from megatron_opd.models.spec import read_model_spec
from megatron_opd.sizing.matching import Served
from tests.support.batches import make_sample
from tests.support.cli_cases import call, refused

# the estimators that may sample from a part of the vocabulary at all
TOP_P = ["--set", "rollout.top_p=0.9", "--set", "objective={type: forward_kl}"]
TOP_P += ["--set", "support={type: teacher_topk}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "0"], ["--prompts", ">= 1", "0"]),
        (["--max-tokens", "0"], ["--max-tokens", ">= 1", "0"]),
        (["--max-tokens", "5000"], ["rollout.max_new_tokens", "2048", "5000"]),
        (["--threshold", "1"], ["--threshold", "< 1", "1"]),
        (["--threshold", "nan"], ["--threshold", "> 0", "nan"]),
        (["--buckets", "8,4"], ["--buckets", "rising", "8,4"]),
        (["--buckets", "0,4"], ["--buckets", "from 1", "0,4"]),
        (["--buckets", "4,x"], ["--buckets", "4,x"]),
        (["--json", "/nowhere/x.json"], ["--json", "/nowhere/x.json"]),
        (["--plot", "x.txt"], ["--plot", ".png", "x.txt"]),
        (TOP_P, ["rollout.top_p", "0.9", "--set rollout.top_p=1"]),
        (["--set", "cluster.type=ray"], ["opd mismatch", "cluster.type=local", "got ray"]),
        (["--set", "student.model=/nowhere"], ["student.model", "/nowhere"]),
        (["--set", "data.train=/nowhere.jsonl"], ["data.train", "/nowhere.jsonl"]),
        (["--set", "student.urls=['http://127.0.0.1:1']"], ["student.urls", "127.0.0.1:1"]),
        (["--set", "learner.listen_host=192.0.2.1"], ["learner.listen_host", "192.0.2.1"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    config: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
):
    refused(capsys, call(tmp_path, config, *arguments, verb="mismatch"), *words)
    assert not (tmp_path / "run").exists(), "run.dir is not touched"


def test_teachers_are_not_needed(tmp_path: Path, config: dict[str, Any]):
    config["teacher"]["model"] = "/nowhere"
    found = mismatch_run.prepare(Config.model_validate(config), 3)
    assert [prompt.uid for prompt in found.prompts] == [0, 1, 2]
    assert "has 1 prompts: some of the 3 are repeated" in found.notes[-1]


def test_experts_are_recorded_where_they_can_be(config: dict[str, Any], models: Path):
    def recorded(**learner: Any) -> LearnerConfig:
        tree = Config.model_validate(config | {"learner": learner})
        spec = read_model_spec(tree.student.model)
        return mismatch_run.with_recorded_routing(tree, spec).learner

    def mode(**learner: Any) -> str:
        return recorded(**learner).routing_replay

    assert mode() == "rollout"
    assert recorded().replays_gates
    assert recorded(routing_replay="rollout").replays_gates
    assert mode(routing_replay="current") == "rollout"
    # with it routers ignore the replayed experts
    assert mode(megatron={"moe_router_load_balancing_type": "sinkhorn"}) == "off"
    config["student"]["urls"] = ["http://127.0.0.1:1"]
    assert mode() == "off", "servers elsewhere are as they are"
    assert not recorded(routing_replay="rollout").replays_gates
    config["student"] = {"model": str(models / "teacher")}
    assert mode() == "off", "a dense model has none"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, FREE),
        ({"routing_replay": "current"}, FREE),
        ({"routing_replay": "rollout"}, REPLAYED),
        ({"routing_replay": "rollout", "routing_weights": "sampler"}, GATED),
    ],
)
def test_the_headline_is_what_training_sees(settings: dict[str, Any], name: str):
    assert mismatch_run.trained_with(LearnerConfig.model_validate(settings)) == name


def made_figures(
    config: dict[str, Any], routing: RoutingGap | None, served: Sequence[Served] = ()
) -> dict[str, Any]:
    """Of three random responses; prefill and learner are the sampler's own, a little off."""
    tree = Config.model_validate(config)
    rollouts = tuple(make_sample(uid, 3 + 4 * uid).rollout for uid in range(3))
    rng = np.random.default_rng(0)
    decode = [-np.abs(rng.normal(size=r.num_response_tokens)).astype(np.float32) for r in rollouts]
    logp = {DECODE: decode, PREFILL: decode, FREE: [logp - np.float32(0.5) for logp in decode]}
    if routing is not None:
        logp[REPLAYED] = decode
        if routing.gated is not None:
            logp[GATED] = decode
    measured = MeasuredMismatch(rollouts, logp, FREE, routing, 1)
    options = Options(3, (4, 64), 0.1, None, None)
    spec = read_model_spec(tree.student.model)
    return figures_of(tree, spec, [r.prompt for r in rollouts], measured, options, served)


def test_servers_elsewhere_are_reported_as_they_are(config: dict[str, Any]):
    """Before: with the file's tp and ep, which they need not have."""
    config["student"] |= {"tp": 2, "urls": [*(f"http://127.0.0.1:{i}" for i in (1, 2, 3))]}
    like = {"dtype": "float32", "ep": 1}
    one = [Served(1, 1, "float32", url) for url in config["student"]["urls"]]
    figures = made_figures(config, None, one)
    assert figures["sampler"] == like | {"tp": 1, "servers": 3}
    assert not [line for line in figures["differences"] if "parallel" in line]
    figures = made_figures(config, None, [*one[:2], Served(4, 1, "float32", "http://127.0.0.1:3")])
    others = [like | {"tp": 4, "servers": 1}]
    assert figures["sampler"] == like | {"tp": 1, "servers": 2, "other_layouts": others}
    (line,) = [line for line in figures["differences"] if line.startswith("learner.parallel.tp")]
    assert line.startswith("learner.parallel.tp=1 and tp=4 of http://127.0.0.1:3:")


def test_tables_and_json(tmp_path: Path, config: dict[str, Any]):
    config["student"] |= {"tp": 2}
    figures = made_figures(config, RoutingGap(400, 8, 4))
    write_json(tmp_path / "figures.json", figures)
    console = Console(width=80, record=True)
    for table in tables(figures):
        console.print(table)
    printed = console.export_text()
    assert "21 tokens of 3 responses" in printed
    gap = figures["comparisons"]["decode_learner"]["gap"]
    assert f"{gap['max_dp']['max']:.1e}" in printed
    assert figures["comparisons"]["decode_prefill"]["gap"]["max_dp"]["max"] == 0
    assert "2 %" in printed, "8 of 400 choices"
    assert "learner.parallel.tp=1 and student.tp=2" in printed
    assert "1 prompts got no response" in printed
    assert [each["tokens"] for each in figures["responses"]] == [3, 7, 11]


def test_plots(tmp_path: Path, config: dict[str, Any]):
    pytest.importorskip("matplotlib")
    figures = made_figures(config, RoutingGap(400, 8, 4))
    for ending, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(figures, tmp_path / f"gap{ending}")
        assert (tmp_path / f"gap{ending}").read_bytes().startswith(head)


def test_a_dense_model_has_no_table_of_routing(config: dict[str, Any]):
    assert len(tables(made_figures(config, None))) == 2
    assert len(tables(made_figures(config, RoutingGap(4, 1, 1)))) == 3


def test_gate_weights_have_rows_of_their_own(config: dict[str, Any]):
    console = Console(width=90, record=True)
    for table in tables(made_figures(config, RoutingGap(400, 8, 4, 2))):
        console.print(table)
    printed = console.export_text()
    for words in ("decode, with replay", "decode, with gates", "with replayed gates", "0.5 %"):
        assert words in printed


def test_a_failure_keeps_the_logs_and_names_them(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    async def fails(self: Any, scratch: Path, *_: object) -> None:
        (scratch / "learner.log").write_text("the end")
        raise PartGone("the learner is gone")

    monkeypatch.setattr(mismatch_run.MismatchRun, "_measured", fails)
    monkeypatch.setattr(mismatch_run.tempfile, "tempdir", str(tmp_path))
    assert call(tmp_path, config, verb="mismatch") == 1
    said = capsys.readouterr().err
    (kept,) = tmp_path.glob("opd-mismatch-*")
    assert said == f"error: the learner is gone; logs are in {kept}\n"
    assert (kept / "learner.log").read_text() == "the end"


def test_bad_input_leaves_no_files(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(mismatch_run.tempfile, "tempdir", str(tmp_path))
    urls = ["--set", "student.urls=['http://127.0.0.1:1']"]
    refused(capsys, call(tmp_path, config, *urls, verb="mismatch"), "student.urls")
    assert list(tmp_path.glob("opd-mismatch-*")) == []
