"""Every field of Megatron's dataclasses is decided, so that a new version's are seen."""

from dataclasses import fields

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_opd.learner.overrides import check_overrides
from megatron_opd.learner.settings import (
    MODEL,
    OWNERS,
    PASSED,
    REFUSED,
    REFUSED_VALUES,
    REMOVED,
    owner_of,
    passed,
    refusal_of,
    removal_of,
    value_refusal_of,
)


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_every_field_is_decided_once(target):
    tables = [*OWNERS[target].values(), *REFUSED[target].values(), PASSED[target]]
    decided = sorted(name for names in tables for name in names)
    inherited = {f.name for base in target.__mro__[1:] if base in PASSED for f in fields(base)}
    assert decided == sorted({field.name for field in fields(target)} - inherited)


def test_what_is_inherited_is_decided_by_the_base():
    assert owner_of(MLATransformerConfig, "num_layers") == MODEL
    assert owner_of(MLATransformerConfig, "kv_lora_rank") == MODEL
    assert owner_of(TransformerConfig, "kv_lora_rank") is None
    assert "CUDA graphs" in str(refusal_of(MLATransformerConfig, "cuda_graph_impl"))
    assert "quantile" not in str(value_refusal_of(MLATransformerConfig, "fp8", "e4m3"))
    refused = "moe_router_load_balancing_type", "quantile_balancing"
    assert value_refusal_of(MLATransformerConfig, *refused) is not None
    assert set(passed(TransformerConfig)) == set(passed(MLATransformerConfig))
    assert removal_of(MLATransformerConfig, "moe_extended_tp") is not None


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_what_is_gone_is_no_field(target):
    assert not REMOVED[target].keys() & {field.name for field in fields(target)}
    assert REFUSED_VALUES.get(target, {}).keys() <= set(PASSED[target])


@pytest.mark.parametrize("target", list(PASSED), ids=lambda target: target.__name__)
def test_each_refusal_is_one_line_with_its_reason(target):
    for name in (name for names in REFUSED[target].values() for name in names):
        with pytest.raises(ValueError, match=rf"^s\.{name} must be left out: ") as caught:
            check_overrides("s", target, {name: 1})
        assert str(caught.value).endswith(str(refusal_of(target, name)))
        assert "\n" not in str(caught.value)
