"""Teachers of other families than a student's, against transformers; all of them:
`python -m checks families`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_opd.learner.verify import of_quantised
from tests.e2e.conftest import running, tiny_spec
from tests.support.coded_models import as_fp8, as_mxfp4
from tests.support.families import SERVED, make
from tests.support.family_errors import ARGUMENTS, ask, errors, seen
from tests.support.figures import bounded
from tests.support.oracles import load_reference

pytestmark = pytest.mark.e2e

KINDS = (
    "Phi-4-mini",
    "SmolLM3",
    "Granite 3 MoE",
    "gpt-oss",
)
"""Fused tensors and part-rotary heads; a class of transformers; multipliers and experts; YaRN,
windows and sinks."""


@pytest.mark.parametrize("name", KINDS)
def test_a_teacher_scores_and_samples_as_transformers_does(name: str, tmp_path: Path):
    """Prefill whole and in chunks, cached prefixes, decode; and each tensor has its say."""
    path = make(SERVED[name], tmp_path / "model")
    with running(tiny_spec(path, "teacher", extra_args=ARGUMENTS), tmp_path / "log") as server:
        answers = ask(server.spec.url)
    model = load_reference(path)
    for kind, nats in errors(answers, model).items():
        bounded("teachers of other families against transformers (nats)", nats, 2e-5, kind)
    least = 2e-5 if name == "gpt-oss" else 1e-4  # 1 % of a sink is little
    assert min(seen(answers, model).values()) > least


@pytest.mark.parametrize(("name", "coded"), [("Qwen3-MoE", as_fp8), ("gpt-oss", as_mxfp4)])
def test_a_quantised_teacher_is_served_dequantised(
    name: str, coded: Callable[[Path, Path], Path], tmp_path: Path
):
    plain = make(SERVED[name], tmp_path / "plain")
    path = coded(plain, tmp_path / "coded")
    with running(tiny_spec(path, "teacher", extra_args=ARGUMENTS), tmp_path / "log") as server:
        answers = ask(server.spec.url)
    model = of_quantised(path, torch.float32)[0].eval()
    for kind, nats in errors(answers, model).items():
        bounded("teachers of other families against transformers (nats)", nats, 2e-5, kind)
    assert max(errors(answers, load_reference(plain)).values()) > 1e-2, "formats round"
