"""How many rows of a file may be bad, and which ids its prompts may hold."""

from pathlib import Path

import numpy as np
import pytest

from megatron_opd.data.faults import Fault
from megatron_opd.data.outcomes import RowOutcome, RowTally
from megatron_opd.data.prompt_rules import PromptRules
from megatron_opd.data.records import Columns


def tally(good: int, bad: int, fraction: float, *, vocab_size: int | None = None) -> RowTally:
    rules = PromptRules(Columns(("prompt",)), 9, max_bad_fraction=fraction, vocab_size=vocab_size)
    counted = RowTally(Path("f"), rules)
    for n in range(good):
        counted.add(RowOutcome(f"f:{n}", {"prompt": "a"}, np.array([1, 5], np.int32)))
    for n in range(bad):
        counted.add(RowOutcome(f"f:{good + n}", fault=Fault("malformed", f"f:{good + n}", "bad")))
    return counted


@pytest.mark.parametrize(
    ("good", "bad", "fraction", "whole", "sampled"),
    [
        (99, 1, 0.01, True, True),
        (98, 2, 0.01, False, True),
        (95, 5, 0.01, False, True),
        (94, 6, 0.01, False, False),
        (0, 3, 1.0, False, False),
        (1, 99, 1.0, True, True),
        (0, 0, 1.0, False, False),
    ],
)
def test_chance_excuses_drawn_rows_alone(
    good: int, bad: int, fraction: float, whole: bool, sampled: bool
):
    counted = tally(good, bad, fraction)
    assert (counted.problem() is None) is whole
    assert (counted.problem(sampled=True) is None) is sampled


@pytest.mark.parametrize(("vocab_size", "fits"), [(5, False), (6, True), (None, True)])
def test_an_id_of_the_size_of_the_vocabulary_is_beyond_it(vocab_size: int | None, fits: bool):
    assert (tally(2, 0, 0.0, vocab_size=vocab_size).problem() is None) is fits
