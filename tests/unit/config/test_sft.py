"""The configuration of fine-tuning."""

from pathlib import Path

from megatron_opd.config.load import load_config
from megatron_opd.config.sft import SftConfig
from tests.support.config_files import write


def test_sft_config_shares_the_learner_section(tmp_path: Path):
    tree = {"init": "a", "output": "b", "train": "c", "learner": {"optimizer": {"lr": 0.001}}}
    assert load_config(SftConfig, write(tmp_path, tree)).learner.optimizer.lr == 0.001
