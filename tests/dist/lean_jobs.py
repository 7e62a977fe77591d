"""What the ranks of the tests of the blockwise log-probs do."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_opd.checkpoint.convert import load_weights, source_of
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner import model as learner_model
from megatron_opd.learner.attention import Packing
from megatron_opd.learner.devices import cpu
from megatron_opd.learner.lm_head import LeanHead, head_slice, install_lean_head
from megatron_opd.learner.model import build_model
from megatron_opd.learner.world import init_world
from megatron_opd.losses.lean import lean_logp
from megatron_opd.losses.passes import HeadSlice
from megatron_opd.losses.vocab_parallel import gather_logp
from megatron_opd.models.spec import read_model_spec

QUANTITIES = "value", "hidden gradient", "weight gradient"


def operation(out: Path) -> None:
    """Results and gradients from shards of the head equal those from the whole one, in float64.

    In halves, in halves of which only the last one has pairs, and with all ids at the first rank:
    the other one's weights are NaN then, as they must not be read.
    """
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    rows, ids, width, count = 7, 24, 5, 40
    hidden_TH, weight_VH, grads = (
        2 * normal(rows, width),
        normal(ids, width),
        normal(count + 2 * rows),
    )
    row_N = torch.randint(rows - 1, (count,), generator=generator)  # the last row has no pair
    id_N = torch.randint(ids, (count,), generator=generator)
    id_N[:2] = torch.tensor([0, ids - 1])

    def outcome(weight: torch.Tensor, id_N: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        inputs = hidden_TH.clone().requires_grad_(), weight.clone().requires_grad_()
        head = HeadSlice(inputs[1], group, ids)
        found = lean_logp(inputs[0], head, row_N, id_N, temperature=0.7, block=(3, 5))
        flat = torch.cat([found.logp_N, found.log_normaliser_T, found.entropy_T])
        flat.backward(grads)
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        return flat.detach(), inputs[0].grad, inputs[1].grad

    half = ids // size
    errors: list[torch.Tensor] = []
    for per_rank, pairs_N in ((half, id_N), (half, id_N // 2 + half), (ids, id_N)):
        expected, grad_TH, grad_VH = outcome(weight_VH, pairs_N, None)
        missing = (size * per_rank - ids, width)
        part = slice(rank * per_rank, (rank + 1) * per_rank)
        weight_vH = torch.cat([weight_VH, weight_VH.new_full(missing, torch.nan)])[part]
        found, part_TH, grad_vH = outcome(weight_vH, pairs_N, dist.group.WORLD)
        dist.all_reduce(part_TH)  # the caller's region does it
        grad_VH = torch.cat([grad_VH, grad_VH.new_zeros(missing)])[part]
        pairs = (found, expected), (part_TH, grad_TH), (grad_vH, grad_VH)
        gaps = [(ours - exact).abs().nan_to_num(torch.inf) for ours, exact in pairs]
        errors.append(torch.stack([gap.max() for gap in gaps]))
    errors_3 = torch.stack(errors).amax(0)
    dist.all_reduce(errors_3, dist.ReduceOp.MAX)
    if rank == 0:
        result = dict(zip(QUANTITIES, errors_3.tolist(), strict=True))
        (out / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Micro:
    """A packed micro-batch and the pairs that its loss weighs."""

    ids_1s: torch.Tensor
    packing: Any
    row_T: torch.Tensor
    row_N: torch.Tensor
    id_N: torch.Tensor
    weight_N: torch.Tensor


def _micro(seed: int, vocab: int) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    lengths, rows, pairs = (9, 6, 5), 12, 50

    def below(limit: int, count: int) -> torch.Tensor:
        return torch.randint(limit, (count,), generator=generator)

    return Micro(
        below(vocab, sum(lengths))[None],
        Packing.of(lengths, torch.device("cpu")),
        torch.randperm(sum(lengths), generator=generator)[:rows],
        below(rows, pairs),
        below(vocab, pairs),
        torch.randn(pairs, dtype=torch.float64, generator=generator),
    )


def _logp(model: GPTModel, lean: bool, out_1s: torch.Tensor, micro: Micro) -> torch.Tensor:
    rows_T, row_N, id_N = out_1s[0].index_select(0, micro.row_T), micro.row_N, micro.id_N
    if not lean:
        group: Any = ps.get_tensor_model_parallel_group()
        return gather_logp(rows_T, row_N, id_N, temperature=0.7, group=group)
    head = head_slice(model)
    return lean_logp(rows_T, head, row_N, id_N, temperature=0.7, block=(5, 50)).logp_N


def _gradients(ddp: Any, micros: list[Micro], lean: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss, and a copy of every parameter's main_grad after Megatron's own schedule."""
    model: GPTModel = ddp.module
    if model.post_process:
        model.output_layer.__class__ = ColumnParallelLinear
    if lean:
        install_lean_head(model)
        assert not model.post_process or isinstance(model.output_layer, LeanHead)
    losses: list[float] = []

    def loss(micro: Micro, out_1s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        logp_N = _logp(model, lean, out_1s, micro)
        value = (micro.weight_N * logp_N * logp_N.detach()).sum()
        losses.append(float(value))
        return value, torch.tensor(len(micro.row_T), dtype=torch.int), {}

    def step(left: Any, module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        micro = next(left)
        out = module(micro.ids_1s, None, None, packed_seq_params=micro.packing)
        return out, partial(loss, micro)

    ddp.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micros),
        model=[ddp],
        num_microbatches=len(micros),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return sum(losses), grads


def through_megatron(out: Path, *, model: Path, parallel: dict[str, int]) -> None:
    """The largest relative difference between lean and dense, over all parameters and ranks."""
    spec = read_model_spec(model)
    mode: AbstractContextManager[Any] = cpu.install()
    # Gradients in the parameters' own type, float64: in float32 a wrong term could hide.
    config = LearnerConfig.model_validate(
        {"dtype": "float32", "parallel": parallel, "ddp": {"grad_reduce_in_fp32": False}}
    )
    with mode, mock.patch.dict(learner_model.DTYPES, float32=torch.float64):
        world = init_world(config.parallel, 1, 1, 60.0)
        (ddp,) = build_model(spec, world, config)
        load_weights(ddp, spec, world, source_of(model, spec, None))
        ddp.config.finalize_model_grads_func = finalize_model_grads
        micros = [_micro(seed, spec.vocab_size) for seed in (1, 2)]
        loss, dense = _gradients(ddp, micros, lean=False)
        lean_loss, lean = _gradients(ddp, micros, lean=True)
    worst = {
        "loss": abs(lean_loss - loss) / max(abs(loss), 1.0),
        **{name: float((lean[name] - g).abs().max() / g.abs().max()) for name, g in dense.items()},
    }
    assert all(g.dtype == torch.float64 for g in dense.values())
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, worst)
    if world.rank == 0:
        names = sorted({name for rank in found for name in rank})
        result = {name: max(rank.get(name, 0.0) for rank in found) for name in names}
        (out / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def locally_accumulated(out: Path, *, model: Path) -> None:
    """By `ddp` settings, the gradients of eight micro-batches in bfloat16: relative errors."""
    spec, exact = read_model_spec(model), dict[str, torch.Tensor]()
    lower = {"grad_reduce_in_fp32": False}
    pattern = {"param_name_patterns_for_fp32_local_accumulation": ["*linear_qkv*", "output_layer*"]}
    errors: dict[str, dict[str, float]] = {}
    with cpu.install():
        world = init_world(LearnerConfig().parallel, 1, 1, 60.0)
        for name, ddp in (("exact", {}), ("lower", lower), ("patterns", lower | pattern)):
            config = LearnerConfig.model_validate({"dtype": "bfloat16", "ddp": ddp})
            (wrapped,) = build_model(spec, world, config)
            load_weights(wrapped, spec, world, source_of(model, spec, None))
            wrapped.config.finalize_model_grads_func = finalize_model_grads
            micros = [_micro(seed, spec.vocab_size) for seed in range(8)]
            _, grads = _gradients(wrapped, micros, lean=True)
            exact = exact or grads
            errors[name] = {
                key: float((grad.double() - exact[key].double()).norm() / exact[key].norm())
                for key, grad in grads.items()
            }
    (out / "result.json").write_text(json.dumps(errors))
