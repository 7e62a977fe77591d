"""Sources of a conversion."""

from pathlib import Path

import pytest
import torch

from megatron_opd.checkpoint.convert import FreshSource, source_of
from megatron_opd.models.spec import read_model_spec


def test_a_fresh_initialisation_depends_on_name_and_seed_alone(dense: Path, tmp_path: Path):
    spec = read_model_spec(dense)
    whole = FreshSource(spec, 1).read("w", (400, 30), 0, 0, 400)
    part = FreshSource(spec, 1).read("w", (400, 30), 1, 10, 5)
    assert torch.equal(part, whole[:, 10:15])
    assert float(whole.std()) == pytest.approx(spec.initializer_range, rel=0.05)
    assert not torch.equal(whole, FreshSource(spec, 2).read("w", (400, 30), 0, 0, 400))
    assert not torch.equal(whole, FreshSource(spec, 1).read("v", (400, 30), 0, 0, 400))
    assert torch.equal(FreshSource(spec, 1).read("norm", (8,), 0, 0, 8), torch.ones(8))
    assert torch.equal(FreshSource(spec, 1).read("q.bias", (8,), 0, 0, 8), torch.zeros(8))
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        source_of(tmp_path, spec, None)
