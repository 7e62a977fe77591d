"""How many files a column touches, and that nothing on its way needs to know it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_opd.records.columns import COLUMNS, GroupColumns, LossColumns, RankBatch
from sglang_bridge.columns import DrawColumns, axis_of, dtypes
from tests.support.paths import ROOT

# A column of every response token that the server computes: (file, after this, these lines).
TOY = (
    (
        "sglang_bridge/columns.py",
        "    sampler_logp_N: Float32s\n",
        "    peak_T: Float32s\n",
    ),
    (
        "sglang_bridge/server/draws.py",
        '            "sampler_logp_N": rows.logp_BR,\n',
        '            "peak_T": _sampled_BV.amax(1).log(),\n',
    ),
)


def test_a_column_that_a_server_records_touches_two_files(tmp_path: Path):
    """From the sampler to the loss: through parser, checkpoint, wire, checks and micro-batch."""
    for package in ("sglang_bridge", "megatron_opd", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    for file, place, lines in TOY:
        source = tmp_path / file
        text = source.read_text(encoding="utf-8")
        assert text.count(place) == 1, f"{file} has changed"
        source.write_text(text.replace(place, place + lines), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.toy_column"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    arrived = json.loads(found.stdout)
    assert arrived["dtype"] == "torch.float64"
    top = np.array([1.0, 2.0, 2.0, 3.0])  # two tokens of each response; 49 other logits are 0
    np.testing.assert_allclose(arrived["peak_T"], top - np.log(np.exp(top) + 49), rtol=1e-6)
    assert len({file for file, *_ in TOY}) == 2


# A column is named where it is declared, filled and read, never where it only passes.
NAMED = {
    "group_log_q_B": {
        "megatron_opd/records/columns.py",
        "megatron_opd/batching/advantages.py",
        "megatron_opd/losses/terms.py",
    },
    "defensive_B": {
        "megatron_opd/records/columns.py",
        "megatron_opd/batching/advantages.py",
        "megatron_opd/losses/terms.py",
    },
    "version_T": {
        "megatron_opd/records/columns.py",
        "megatron_opd/batching/rank_batch.py",
        "megatron_opd/batching/checks.py",
        "megatron_opd/learner/micro_batch.py",
    },
}


@pytest.mark.parametrize("column", NAMED)
def test_a_column_is_named_where_it_is_declared_filled_and_read(column: str):
    sources = [*ROOT.glob("megatron_opd/**/*.py"), *ROOT.glob("sglang_bridge/**/*.py")]
    naming = {
        str(source.relative_to(ROOT))
        for source in sources
        if column in source.read_text(encoding="utf-8")
    }
    assert naming == NAMED[column]


def test_what_passes_a_column_on_names_none():
    """Frames, checks of lengths and the loss's float64 copy would each need an edit otherwise."""
    passed_on = {*dtypes(GroupColumns), *dtypes(DrawColumns), "teacher_logp_N"}
    for file in ("transport/frames.py", "learner/micro_batch.py", "batching/shares.py"):
        text = (ROOT / "megatron_opd" / file).read_text(encoding="utf-8")
        assert not {name for name in passed_on if name in text}, file


def test_every_column_has_an_axis_and_a_type():
    assert {axis_of(name) for name in COLUMNS} == {"B", "T", "N", "S"}
    assert {dtype.name for dtype in COLUMNS.values()} == {"int32", "int64", "float32", "float64"}
    assert dtypes(RankBatch) == COLUMNS
    assert COLUMNS["sampler_logp_N"] == np.float32, "through the types of generic records"
    assert set(dtypes(LossColumns)) < set(COLUMNS)
