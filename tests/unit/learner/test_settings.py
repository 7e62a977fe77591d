"""Every field of Megatron's dataclasses is decided, so that a new version's are seen."""

import dataclasses

import pytest

from megatron_opd.learner.overrides import check_overrides
from megatron_opd.learner.settings import (
    OWNERS,
    PASSED,
    REFUSED,
    REFUSED_VALUES,
    REMOVED,
    refusal_of,
)


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_every_field_is_decided_once(target):
    tables = [*OWNERS[target].values(), *REFUSED[target].values(), PASSED[target]]
    decided = sorted(name for names in tables for name in names)
    assert decided == sorted({field.name for field in dataclasses.fields(target)})


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_what_is_gone_is_no_field(target):
    assert not REMOVED[target].keys() & {field.name for field in dataclasses.fields(target)}
    assert REFUSED_VALUES.get(target, {}).keys() <= set(PASSED[target])


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_each_refusal_is_one_line_with_its_reason(target):
    for name in (name for names in REFUSED[target].values() for name in names):
        with pytest.raises(ValueError, match=rf"^s\.{name} must be left out: ") as caught:
            check_overrides("s", target, {name: 1})
        assert str(caught.value).endswith(str(refusal_of(target, name)))
        assert "\n" not in str(caught.value)
