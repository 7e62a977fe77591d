"""What the ranks of the tests of the gated delta net do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from megatron_opd.config.learner import ParallelConfig
from megatron_opd.learner.attention import Packing, RMSNorm
from megatron_opd.learner.context_parallel import share_of
from megatron_opd.learner.delta_net import PackedDeltaNet
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.world import init_world

LENGTHS = (72, 4, 20)  # the first is longer than a chunk of the rule
HIDDEN, KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH = 32, 4, 8, 8, 16, 4
SECTIONS = (KEYS * KEY_DIM, KEYS * KEY_DIM, VALUES * VALUE_DIM)


def _rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """This rank's rows of every part."""
    rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    return torch.cat([part.chunk(size)[rank] for part in parts])


def forward_and_backward(out: Path, *, weights: Path, parallel: dict[str, int]) -> None:
    """One layer on packed segments: outputs, and gradients of the input and each parameter."""
    given = load_file(weights)
    layout = ParallelConfig(**parallel)
    with cpu.install():
        init_world(layout, 1, 1, 60.0)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            activation_func=F.silu,
            layernorm_epsilon=1e-6,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
            tensor_model_parallel_size=layout.tp,
            context_parallel_size=layout.cp,
            sequence_parallel=layout.tp > 1,
            linear_conv_kernel_dim=WIDTH,
            linear_key_head_dim=KEY_DIM,
            linear_value_head_dim=VALUE_DIM,
            linear_num_key_heads=KEYS,
            linear_num_value_heads=VALUES,
        )
        parts: Any = GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layer = PackedDeltaNet(config, parts, layer_number=1, pg_collection=groups)
        q_k_v = list(given["in_proj_qkv.weight"].split(SECTIONS))
        rest = [given[f"in_proj_{name}.weight"] for name in "zba"]
        values: dict[str, torch.Tensor] = {
            "in_proj.weight": _rows([*q_k_v, *rest]),
            "conv1d.weight": _rows(list(given["conv1d.weight"].split(SECTIONS))),
            "dt_bias": _rows([given["dt_bias"]]),
            "A_log": _rows([given["A_log"]]),
            "out_norm.weight": given["norm.weight"],
            "out_proj.weight": _rows([given["out_proj.weight"].t()]).t(),
        }
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(values.pop(name))
        assert not values
        cp, cp_rank = layout.cp, ps.get_context_parallel_rank()
        mine = share_of(LENGTHS, cp, cp_rank)
        tp, tp_rank = layout.tp, ps.get_tensor_model_parallel_rank()
        mine = mine.reshape(tp, -1)[tp_rank]  # sequence parallelism
        x = given["x"][mine][:, None].clone().requires_grad_()
        packing = Packing.of(LENGTHS, torch.device("cpu"), cp, cp_rank)
        found, _ = layer(x, None, packed_seq_params=packing)
        (found[:, 0] * given["weights_of_outputs"][mine]).sum().backward()
        report = {"places": mine.tolist(), "out": found[:, 0].tolist(), "x": x.grad[:, 0].tolist()}
        summed = {}
        for name, parameter in layer.named_parameters():
            grad = parameter.grad.clone()
            dist.all_reduce(grad, group=ps.get_context_parallel_group())
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(grad, group=ps.get_tensor_model_parallel_group())
            summed[name] = grad
        whole: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(whole, (tp_rank, report, {n: g.tolist() for n, g in summed.items()}))
    if dist.get_rank() == 0:
        (out / "result.json").write_text(json.dumps(whole))
    dist.destroy_process_group()
