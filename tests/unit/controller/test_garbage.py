"""Cyclic garbage is searched for rarely, and as before once that is over."""

import gc

import pytest

from megatron_opd.controller.garbage import LEAST, OBJECTS, freeze_objects, rare_collections


@pytest.mark.parametrize("samples", [1, LEAST])
def test_the_search_waits_for_as_many_objects_as_are_held(samples: int):
    before = gc.get_threshold()

    with rare_collections(samples):
        assert gc.get_threshold()[0] == max(LEAST, samples * OBJECTS)

    assert gc.get_threshold() == before


def test_a_failure_inside_leaves_the_search_as_it_was():
    before = gc.get_threshold()

    with pytest.raises(ValueError, match="broken"), rare_collections(1):
        raise ValueError("broken")

    assert gc.get_threshold() == before


def test_what_is_put_aside_is_not_looked_through_again():
    before = gc.get_freeze_count()

    freeze_objects()

    assert gc.get_freeze_count() > before
    gc.unfreeze()
