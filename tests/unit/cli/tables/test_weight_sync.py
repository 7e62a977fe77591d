"""What `opd check` says of a weight sync: layouts side by side, bytes, seconds, warnings."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_opd.cli.tables.weight_sync import sync_tables
from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.output import byte_text
from megatron_opd.sizing.learner import follower_bytes, learner_memory
from megatron_opd.sizing.parameters import model_parameters
from megatron_opd.weight_sync.disk_plan import DiskSizes, disk_sizes, versions_at_once
from megatron_opd.weight_sync.disk_versions import needed
from megatron_opd.weight_sync.holdings import server_holdings
from megatron_opd.weight_sync.sizes import sync_sizes
from sglang_bridge.weights.manifest import version_name
from tests.support.cli_cases import call, refused, small_config, tiny_models
from tests.support.config_files import minimal
from tests.support.published import spec_of

MOE = spec_of("Qwen3-30B-A3B")


def shown(config: Config, spec: ModelSpec, link_gbs: float = 50) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        for table in sync_tables(config, spec, link_gbs):
            console.print(table)
    return " ".join(capture.get().split())


def config_of(**weight_sync: object) -> Config:
    return minimal(
        student={"model": "s", "dtype": "bfloat16", "servers": 4, "tp": 2, "ep": 2},
        learner={"dtype": "bfloat16", "parallel": {"tp": 2, "pp": 2, "dp": 4, "ep": 8}},
        weight_sync=weight_sync,
    )


def test_the_layout_of_servers_elsewhere_is_their_own():
    """Before: the file's, which they need not have, and whether that is the learner's."""
    here = config_of()
    student = here.student.model_copy(update={"urls": ("http://a:1",)})
    elsewhere = shown(here.model_copy(update={"student": student}), MOE)
    assert "tensor parallel 2 2 yes expert parallel 8 2 no" not in elsewhere
    assert elsewhere.count("the servers' own asked at the start") == 3
    assert "context parallel 1 1 yes" in elsewhere
    assert "to servers of student.tp 2 and ep 2" in elsewhere
    assert "the servers' own" not in shown(here, MOE)


def test_sizes_are_those_of_what_the_ranks_hold():
    sizes = sync_sizes(config_of(), MOE)
    share = [0, 0]
    for held in server_holdings(MOE, 2, 2):
        for rank in held.ranks:
            share[rank] += 2 * held.length * math.prod(held.shape) // held.shape[held.dim]
    assert sizes.received == share
    assert len(sizes.sent) == 16
    assert sum(sizes.sent) == 4 * sum(share)
    assert 1.0 <= sizes.imbalance < 1.01
    assert sizes.seconds(50) == pytest.approx(max(share) / 50e9)
    assert sizes.seconds(25) == 2 * sizes.seconds(50)
    assert sizes.shadow == 0


def test_quantised_bytes_are_half_of_bfloat16():
    settings: dict[str, Any] = {"tp": 2, "ep": 2, "dtype": "bfloat16"}
    sizes, plain = (
        sync_sizes(minimal(student={"model": "s", "quantization": format, **settings}), MOE)
        for format in ("int8", None)
    )
    # embeddings and head stay; every scale of 4 bytes is a row's of 768 numbers or more
    assert 0.5 < sum(sizes.received) / sum(plain.received) < 0.52
    assert sum(sizes.sent) == sum(sizes.received)
    config = minimal(student={"model": "s", "quantization": "int8", **settings})
    said = shown(config, MOE)
    assert "matrices bfloat16 int8 no" in said
    assert "its own share of the weights 14.6 GiB" in said
    assert "that share in bfloat16, not quantised 28.4 GiB" in said


def test_shadow_buffers_are_counted_and_limited():
    share = max(sync_sizes(config_of(), MOE).received)
    assert sync_sizes(config_of(staging=True), MOE).shadow == share
    assert sync_sizes(config_of(staging=True, staging_bytes=2**30), MOE).shadow == 2**30
    assert sync_sizes(config_of(staging=True, staging_bytes=2**40), MOE).shadow == share
    assert "shadow buffers of a server rank 1.0 GiB" in shown(
        config_of(staging=True, staging_bytes=2**30), MOE
    )


def test_the_copy_beside_which_the_learner_goes_on_is_counted():
    """A rank's shards in learner.dtype, which the servers' dtype is not."""
    assert sync_sizes(config_of(), MOE).copied == 0
    config = config_of(overlap=True)
    copied = sync_sizes(config, MOE).copied
    stages = learner_memory(MOE, config.learner, 512)
    assert copied == max(stage.weights for stage in stages)
    assert f"copy of its shards in a learner rank {copied / 2**30:.1f} GiB" in shown(config, MOE)
    assert "copy of its shards" not in shown(config_of(), MOE)


def test_the_tables_say_what_differs_and_what_travels():
    text = shown(config_of(), MOE)
    assert "tensor parallel 2 2 yes" in text
    assert "expert parallel 8 2 no" in text
    assert "bytes sent by a learner rank, of 16 14.2 GiB" in text
    assert "bytes received by a server rank, of 8 28.4 GiB" in text
    assert "pairs of ranks that talk 112 of 128" in text
    assert "seconds at 50 GB/s a rank 0.61" in text
    assert "seconds at 5 GB/s a rank 6.11" in shown(config_of(), MOE, 5)
    assert "shard to shard" not in shown(config_of(type="broadcast"), MOE)


def fleet_of(servers: int, **weight_sync: object) -> Config:
    """More ranks of servers than of the learner, which holds every expert once."""
    config = config_of(**weight_sync)
    return config.model_copy(
        update={"student": config.student.model_copy(update={"servers": servers})}
    )


def test_with_relay_no_rank_sends_a_slice_twice_and_time_does_not_grow():
    direct, one = sync_sizes(fleet_of(32), MOE), sync_sizes(fleet_of(1), MOE)
    relayed = sync_sizes(fleet_of(32, relay=True), MOE)
    assert relayed.received == direct.received == one.received
    assert direct.passed_on == one.passed_on == [0, 0]
    assert relayed.passed_on == relayed.received, "the first server passes all of it on"
    # of what has replicas each sends a copy; experts have one
    assert max(one.sent) <= max(relayed.sent) < 1.2 * max(one.sent)
    assert max(direct.sent) == pytest.approx(32 * max(one.sent), rel=0.1)
    # the LM head: 4 ranks hold a half of it, in a bucket of its own
    longest_chain = 7 * MOE.vocab_size * MOE.hidden_size
    assert relayed.delay == longest_chain
    seconds = [sizes.seconds(50) for sizes in (one, relayed, direct)]
    assert seconds[1] == pytest.approx(seconds[0] + longest_chain / 50e9)
    assert seconds[2] > 2 * seconds[1]


def test_servers_that_all_replicas_serve_pass_on_nothing_of_those():
    """Experts have one replica, attention 4 of each half; the chain of 3 is the experts' alone."""
    sizes = sync_sizes(fleet_of(3, relay=True), MOE)
    assert 0 < max(sizes.passed_on) < max(sizes.received)
    assert sizes.delay == 2 * 2 * 768 * 2048, "the largest bucket of a chain is an expert's matrix"


def test_the_tables_say_what_is_passed_on():
    text = shown(fleet_of(32, relay=True), MOE)
    assert "bytes passed on by a server rank 28.4 GiB" in text
    assert "buffers of a learner rank 1.0 GiB" in text
    assert "buffers of a server rank 2.0 GiB" in text
    assert "buffers of every rank" not in text
    assert "passed on" not in shown(fleet_of(32), MOE)


def test_what_a_directory_needs_is_told(tmp_path: Path):
    """Each number is written once, by one of the ranks that hold it."""
    disk: dict[str, object] = {"type": "disk", "directory": str(tmp_path / "w")}
    total = model_parameters(MOE).total
    sizes = disk_sizes(config_of(**disk), MOE)
    assert sizes == DiskSizes(2 * total, sizes.written, 3, 0)
    assert 1.0 <= sizes.written * 16 / sizes.whole < 1.1
    text = shown(config_of(**disk), MOE)
    assert "bytes of a whole version 56.9 GiB" in text
    assert "whole versions there at once 3" in text
    assert "space of the whole versions 170.6 GiB" in text
    assert "shard to shard" not in text
    delta = {**disk, "delta": True, "keep_versions": 12, "full_every": 10}
    assert disk_sizes(config_of(**delta), MOE) == replace(sizes, wholes=3, changes=19)
    assert "last version in memory of a learner rank" in shown(config_of(**delta), MOE)
    away = {**disk, "directory": "/no/such/place"}
    assert "free here unknown: not on this machine" in shown(config_of(**away), MOE)


@settings(max_examples=200, deadline=None)
@given(keep=st.integers(1, 9), every=st.integers(1, 9), data=st.data())
def test_no_more_versions_are_there_at_once(keep: int, every: int, data: st.DataObject):
    """A run whose servers take every version, as its writer deletes."""
    settings = {"delta": True, "keep_versions": keep, "full_every": every}
    config = minimal(weight_sync={"type": "disk", "directory": "w", **settings})
    wholes, changes = versions_at_once(config.weight_sync)
    bases: dict[str, str | None] = {}
    for step in range(data.draw(st.integers(1, 40))):
        last = next(reversed(bases), None)
        kept = needed(bases, keep, last)
        bases = {name: base for name, base in bases.items() if name in kept}
        bases[version_name(step, step)] = last if step % every else None
        assert list(bases.values()).count(None) <= wholes
        assert len(bases) <= wholes + changes


def test_too_little_space_and_what_others_left_are_noted(
    tmp_path: Path, config: dict, capsys, monkeypatch: pytest.MonkeyPatch
):
    weights = tmp_path / "w"
    config["weight_sync"] = {"type": "disk", "directory": str(weights)}
    assert call(tmp_path, config, verb="check") == 0
    assert "note" not in capsys.readouterr().out
    (weights / "run-0123456789ab").mkdir(parents=True)
    full = shutil.disk_usage(tmp_path)._replace(free=2000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert call(tmp_path, config, verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "has 0.0 MiB free, and 3 whole versions take" in said
    assert "or lower weight_sync.keep_versions" in said
    assert "weight_sync.directory holds weights of 1 other runs, as" in said


@pytest.fixture
def config(tmp_path: Path) -> dict:
    return small_config(tmp_path, tiny_models(tmp_path))


def test_a_difference_is_a_note_an_error_or_nothing(tmp_path: Path, config: dict, capsys):
    config["student"] |= {"tp": 2, "dtype": "float32"}
    config["learner"] = {"dtype": "float32"}
    assert call(tmp_path, config, verb="check") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "wider gap between learner and sampler: learner.parallel.tp=1 and student.tp=2" in said
    config["weight_sync"] = {"match": "off"}
    assert call(tmp_path, config, verb="check") == 0
    assert "wider gap" not in capsys.readouterr().out
    config["weight_sync"] = {"match": "require"}
    words = ["weight_sync.match=require", "learner.parallel.tp=1 and student.tp=2"]
    for verb in ("check", "run"):
        refused(capsys, call(tmp_path, config, verb=verb), *words)


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "inf", "fast"])
def test_a_link_speed_is_a_number_above_zero(tmp_path: Path, config: dict, speed: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(tmp_path, config, "--link-gbs", speed, verb="check")
    assert f"must be a number > 0, got '{speed}'" in capsys.readouterr().err


def test_what_teachers_that_follow_cost_is_told():
    """An average of float32 and a copy of it, of the parameters of a rank; a server's own share."""
    model = {"model": "s", "dtype": "bfloat16", "tp": 2}
    source = {"type": "ema", "decay": 0.99, "every": 3}
    config = minimal(
        student=model,
        teacher={**model, "source": source},
        learner={"dtype": "bfloat16", "parallel": {"tp": 2, "dp": 2, "ep": 2}},
        schedule={"sync_every": 2},
    )
    worst = max(learner_memory(MOE, config.learner, 1), key=lambda stage: stage.weights)
    assert follower_bytes(MOE, config.learner, config.teacher.source) == 2 * 2 * worst.weights
    text = shown(config, MOE)
    kept = byte_text(2 * 2 * worst.weights)
    assert f"teacher ema 4 updates {kept} " in text
    assert "teachers that follow" not in shown(config_of(), MOE)
