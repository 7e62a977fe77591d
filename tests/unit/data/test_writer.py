"""The data writer."""

import pytest

from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.prompts import load_prompts
from megatron_opd.data.records import Columns, read_records
from megatron_opd.data.tasks import get_verifier
from megatron_opd.data.tokenizer import build_tokenizer
from megatron_opd.data.writer import write_task


def test_written_data_reads_back_and_is_reproducible(tmp_path):
    rules = PromptRules(Columns(("prompt",), ("answer",), needed=False), 16)
    tokenizer = build_tokenizer()
    written = write_task("arithmetic", tmp_path / "new" / "one", train=24, heldout=12, seed=5)
    assert (written.train, written.heldout) == (24, 12)
    prompts = []
    for path, count in ((written.train_file, 24), (written.heldout_file, 12)):
        rows = read_records(path, ["prompt", "answer", "response"])
        assert len(rows) == count
        assert all(get_verifier("arithmetic")(row["response"], row["answer"]) for row in rows)
        assert len(load_prompts(path, tokenizer, rules).prompts) == count
        prompts += [row["prompt"] for row in rows]
    assert len(set(prompts)) == 36
    again = write_task("arithmetic", tmp_path / "two", train=24, heldout=12, seed=5)
    assert again.train_file.read_bytes() == written.train_file.read_bytes()
    assert again.heldout_file.read_bytes() == written.heldout_file.read_bytes()


def test_a_task_without_problems_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="'exact' has no problems of its own; choices: arithmetic"):
        write_task("exact", tmp_path, 1, 1, 0)
