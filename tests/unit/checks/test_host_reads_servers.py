"""What the hooks compute makes a server's host wait for nothing, whatever requests want."""

import pytest
import torch

from tests.support.fake_card import FakeCard, on_card
from tests.support.server_steps import WANTED, decode_step, scoring_pass


@pytest.mark.parametrize("name", WANTED)
def test_a_decode_step_reads_nothing_and_finds_the_same_rows(name: str):
    with FakeCard() as card:
        found = decode_step(on_card, **WANTED[name])
    assert not card.lines, card.lines
    _same(found, decode_step(torch.clone, **WANTED[name]))


def test_a_scoring_pass_reads_nothing_and_finds_the_same_scores():
    with FakeCard() as card:
        found = scoring_pass(on_card)
    assert not card.lines, card.lines
    _same(found, scoring_pass(torch.clone))


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert values.numel()
