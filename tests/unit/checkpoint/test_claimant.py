"""Which run a claim is of: that of a directory, for as long as the directory is there."""

import os
from pathlib import Path

from megatron_opd.checkpoint.claimant import RUN_ID, claimant_of
from megatron_opd.checkpoint.run_dir import check_run_dir, prepare_run_dir
from megatron_opd.config.schema import Config
from tests.support.cli_cases import small_config, tiny_models


def test_a_run_s_students_are_its_own_and_its_teachers_are_anybody_s(tmp_path: Path):
    claimant = claimant_of("run", tmp_path)
    student = claimant.claim(writes=True)
    assert student.writes
    assert not claimant.claim(writes=False).writes
    assert student.name.startswith(f"run {tmp_path} (pid {os.getpid()} on ")


def test_who_holds_the_directory_next_is_the_same_run_in_another_process(tmp_path: Path):
    first = claimant_of("run", tmp_path)
    assert claimant_of("run", tmp_path).run != first.run
    first.keep(tmp_path)
    config = Config.model_validate(small_config(tmp_path, tiny_models(tmp_path / "models")))
    check_run_dir(tmp_path / "new", resume=False, overwrite=False)
    prepare_run_dir(tmp_path, config)
    following = claimant_of("run", tmp_path)
    assert following.run == first.run
    assert following.process != first.process


def test_a_damaged_id_is_none(tmp_path: Path):
    for damaged in (b"", b"\xff" * 32, b"a" * 31, b"a" * 33, b"A" * 32):
        (tmp_path / RUN_ID).write_bytes(damaged)
        assert len(claimant_of("run", tmp_path).run) == 32
        assert claimant_of("run", tmp_path).run.encode() != damaged
