"""The format of a model's calls is the one in which its chat template writes them."""

import pytest

from megatron_opd.environments.call_format import call_format
from megatron_opd.environments.formats import FORMATS
from tests.support.chat_families import FAMILIES

KNOWN = [family for family in FAMILIES if family.format is not None]
UNKNOWN = [family for family in FAMILIES if family.format is None]


@pytest.mark.parametrize("family", KNOWN, ids=lambda family: family.name)
def test_it_is_found(family):
    assert call_format(family.encoder()) is FORMATS[family.format].template


@pytest.mark.parametrize("family", UNKNOWN, ids=lambda family: family.name)
def test_a_template_that_writes_no_calls_needs_a_name(family):
    with pytest.raises(ValueError, match=r"no known format: name one in environment.tool_format"):
        call_format(family.encoder())
    assert call_format(family.encoder(), "hermes") is FORMATS["hermes"].template


def test_there_are_families_of_both_kinds():
    assert len(KNOWN) >= 6
    assert UNKNOWN
