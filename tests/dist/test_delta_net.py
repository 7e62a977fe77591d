"""The gated delta net on packed segments, tensor and context parallel, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.dist import delta_net_jobs as jobs
from tests.dist.worlds import run_world
from tests.support.figures import bounded

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Weights and inputs in a file; transformers' outputs and gradients, each segment alone."""
    config = Qwen3_5TextConfig(
        hidden_size=jobs.HIDDEN,
        linear_num_key_heads=jobs.KEYS,
        linear_num_value_heads=jobs.VALUES,
        linear_key_head_dim=jobs.KEY_DIM,
        linear_value_head_dim=jobs.VALUE_DIM,
        linear_conv_kernel_dim=jobs.WIDTH,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-6,
    )
    generator = torch.Generator().manual_seed(3)
    layer = Qwen3_5GatedDeltaNet(config, 0).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(noise * scale + (1.0 if name == "norm.weight" else 0.0))
    count = sum(jobs.LENGTHS)
    x = torch.randn(count, jobs.HIDDEN, generator=generator, dtype=torch.float64)
    weights = torch.randn(count, jobs.HIDDEN, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    out = torch.cat([layer(part[None])[0] for part in x.split(jobs.LENGTHS)])
    (out * weights).sum().backward()
    state = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    path = tmp_path_factory.mktemp("delta") / "weights.safetensors"
    save_file({**state, "x": x.detach().clone(), "weights_of_outputs": weights}, path)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return path, {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_segments_mix_as_transformers_mixes_each_alone(
    parallel: dict[str, int], exact: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    path, expected = exact
    size = parallel.get("tp", 1) * parallel.get("cp", 1)
    ranks: Any = run_world(
        jobs.forward_and_backward, size, tmp_path, weights=path, parallel=parallel
    )
    for key in ("out", "x"):
        found = torch.full_like(expected[key], torch.nan)
        for _, report, _ in ranks:
            found[report["places"]] = torch.tensor(report[key], dtype=torch.float64)
        gap = (found - expected[key]).abs().max() / expected[key].abs().max()
        bounded("gated delta net against transformers: outputs, gradients", float(gap), 1e-5)
    by_rank = {tp_rank: grads for tp_rank, _, grads in ranks}
    joined = {
        name: [torch.tensor(by_rank[r][name], dtype=torch.float64) for r in sorted(by_rank)]
        for name in by_rank[0]
    }
    q_k_v = list(expected["in_proj_qkv.weight"].split(jobs.SECTIONS))
    sections = [*q_k_v, *(expected[f"in_proj_{name}.weight"] for name in "zba")]
    conv = list(expected["conv1d.weight"].split(jobs.SECTIONS))
    pairs = {
        "in_proj.weight": sections,
        "conv1d.weight": conv,
        "dt_bias": [expected["dt_bias"]],
        "A_log": [expected["A_log"]],
        "out_proj.weight": [expected["out_proj.weight"].t()],
    }
    for name, parts in pairs.items():
        for rank, found in enumerate(joined[name]):
            mine = torch.cat([part.chunk(len(joined[name]))[rank] for part in parts])
            found = found.t() if name == "out_proj.weight" else found
            gap = (found - mine).abs().max() / mine.abs().max()
            bounded("gated delta net against transformers: weights' gradients", float(gap), 1e-5)
    for found in joined["out_norm.weight"]:
        gap = (found - expected["norm.weight"]).abs().max() / expected["norm.weight"].abs().max()
        bounded("gated delta net against transformers: weights' gradients", float(gap), 1e-5)
