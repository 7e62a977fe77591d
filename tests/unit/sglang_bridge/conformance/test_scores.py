"""What the checks say of a float64 language model behind the real routes, sound and unsound."""

import asyncio

import pytest

from sglang_bridge.conformance import refusals, scores
from sglang_bridge.conformance.main import Check, run
from tests.support.toy_scorer import (
    Cold,
    Credulous,
    Early,
    Farsighted,
    FirstAtoms,
    Forgetful,
    Late,
    Sociable,
    ToyScorer,
    Unnormalised,
    WarmDraws,
    served,
)

CHECKS: list[Check] = [*scores.CHECKS, *refusals.CHECKS]


def failed(scorer: ToyScorer, checks: list[Check]) -> list[str]:
    with served(scorer) as url:
        found = asyncio.run(run(url, None, checks))
    assert len(found) == len(checks)
    return [each.check for each in found if not each.holds]


def test_a_sound_server_passes():
    assert failed(ToyScorer(), CHECKS) == []


@pytest.mark.parametrize(
    ("unsound", "check"),
    [
        (Late, scores.ignores_itself),
        (Early, scores.reads_the_last),
        (Unnormalised, scores.sums_to_one),
        (Cold, scores.follows_temperature),
        (Farsighted, scores.ignores_the_future),
        (Sociable, scores.same_in_company),
        (Forgetful, scores.same_again),
        (FirstAtoms, scores.atoms_are_likeliest),
        (WarmDraws, scores.draws_are_drawn),
        (Credulous, refusals.bad_json_is_refused),
    ],
)
def test_each_planted_fault_fails_its_check(unsound: type[ToyScorer], check: Check):
    assert len(failed(unsound(), [check])) == 1
