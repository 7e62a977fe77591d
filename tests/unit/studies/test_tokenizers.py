"""The other teacher's tokenizer, its shuffled control, and one factor at a time."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_opd.data.tokenizer import build_tokenizer
from studies.tokenizers import SEEDS, SETTINGS, pieces, said, shuffle_digits, trials

TEXTS = ["12+34=\n12+0=3c1\n#46", "12-34=\n2-0=9b1\n#22"] * 9


def test_pieces_spell_what_they_read_and_the_control_s_do_not(tmp_path: Path):
    made = pieces(build_tokenizer(), TEXTS)
    for text in (TEXTS[0], "naïve ☕"):
        assert made.decode(made.encode(text)) == text
    assert len(made.encode(TEXTS[0])) < len(TEXTS[0])
    assert made.encode("é") == [made.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "é".encode()]
    made.save_pretrained(tmp_path)
    shuffle_digits(tmp_path / "tokenizer.json")
    control = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = made.encode(TEXTS[0])
    table = str.maketrans("0123456789", "1234567890")
    assert control.decode(ids) == TEXTS[0].translate(table)
    assert control.encode(TEXTS[0].translate(table)) == ids
    assert (
        control.get_vocab().keys()
        == json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"].keys()
    )


def test_trials_differ_in_one_factor():
    found = trials()
    assert len({trial.name for trial in found}) == len(found) == len(SETTINGS) * len(SEEDS)
    by_seed = [trial.overrides for trial in found if trial.seed == SEEDS[1]]
    same, drop, *_ = by_seed
    assert {key for key in drop if same.get(key) != drop[key]} == {
        "teacher.model",
        "scoring.alignment",
    }


def test_figures_of_a_setting():
    curves = {"reverse_kl_nats": [3.0] * 4 + [1.0] * 4}
    curves |= {"aligned_token_fraction": [None] * 8, "aligned_mass_fraction": [0.5] * 8}
    rows = [
        {
            "seed": seed,
            "summary": {
                "student_accuracy_after_pct": 10.0 * seed,
                "student_accuracy_before_pct": 5.0,
                "teacher_accuracy_pct": 90.0,
            },
            "curves": curves,
        }
        for seed in (1, 2)
    ]
    found = said(rows)
    assert (found["mean_pct"], found["before_pct"], found["teacher_pct"]) == (15.0, 5.0, 90.0)
    assert found["reverse_kl_nats_first"] == 3.0
    assert found["reverse_kl_nats_last"] == 1.0
    assert found["aligned_token_fraction_last"] is None
    assert found["aligned_mass_fraction_last"] == pytest.approx(0.5)
    assert said([])["mean_pct"] is None
