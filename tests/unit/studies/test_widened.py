"""A widened checkpoint computes what it did, and more of it can be trained."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from studies.widened import write_widened
from tests.support.paths import ROOT

STUDENT = ROOT / "examples" / "arithmetic" / "student"


def test_it_computes_the_same_and_the_new_features_learn(tmp_path):
    wide = write_widened(STUDENT, tmp_path / "wide", 160)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (STUDENT, wide)
    ]
    ids = torch.arange(24)[None]
    old, new = (model(ids).logits for model in models)
    assert (old - new).abs().max() < 1e-4
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes[1] > 1.1 * sizes[0]
    new.square().sum().backward()
    grown = [p.grad for name, p in models[1].named_parameters() if "down_proj" in name]
    assert len(grown) > 0
    assert all((g[..., 128:] != 0).any() for g in grown)
    assert write_widened(STUDENT, wide, 160) == wide, "written once"


def test_what_is_as_wide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="experts have 128 features, asked for 128"):
        write_widened(STUDENT, tmp_path / "wide", 128)
