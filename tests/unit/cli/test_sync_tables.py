"""What `opd check` says of a weight sync: layouts side by side, bytes, seconds, warnings."""

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_opd.cli.sync_tables import sync_sizes, sync_tables
from megatron_opd.config.schema import Config
from megatron_opd.models.spec import ModelSpec
from megatron_opd.weight_sync.holdings import server_holdings
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
