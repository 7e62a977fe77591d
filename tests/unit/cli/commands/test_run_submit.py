"""What is handed on to the command line that runs in a Ray cluster."""

import pytest

from megatron_opd.cli.commands.run import run_arguments
from megatron_opd.cli.main import build_parser


@pytest.mark.parametrize("again", ["--overwrite", "--resume", "--auto-resume"])
def test_a_submitted_run_gets_every_option(again: str):
    """Before: --auto-resume was left out."""
    options = [again, "--accept-changes", "run.seed", "--set", "run.seed=7"]
    given = build_parser().parse_args(["run", "config.yaml", *options])
    there = build_parser().parse_args(["run", "config.yaml", *run_arguments(given)])
    assert there.overrides == ["run.seed=7", "cluster.ray.submit=null"]
    there.overrides = given.overrides
    assert there == given
