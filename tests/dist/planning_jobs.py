"""What a rank of a built learner really holds, for comparison with a plan."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_opd.config.estimator import Estimator
from megatron_opd.records.types import Batch
from tests.dist.exchange_counts import ExchangeCounts, groups
from tests.dist.jobs import make_learner, share


class SavedBytes:
    """Bytes of distinct tensors that each layer's forward pass saves for its backward pass.

    Only what comes before the first backward pass counts, which asks the first tensor back: passes
    says how many micro-batches that was. Parameters are not activations.
    """

    def __init__(self, layers: list[torch.nn.Module], parameters: set[int]) -> None:
        self.by_layer, self.passes = [0] * len(layers), [0] * len(layers)
        self.tokens, self.seen = 0, set(parameters)
        self.current: int | None = None
        self.inputs: dict[int, int] = {}
        self.forward = True
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enter(index), with_kwargs=True)
            layer.register_forward_hook(self._leave)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _enter(self, index: int) -> Any:
        def enter(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.current = index
            hidden = args[0] if args else kwargs["hidden_states"]
            self.tokens = hidden.shape[0]
            if self.forward:
                self.passes[index] += 1
                self.inputs[hidden.untyped_storage().data_ptr()] = index

        return enter

    def _leave(self, *_: Any) -> None:
        self.current = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        owner = self.current
        if owner is None:  # recomputation saves a layer's input outside of it
            owner = self.inputs.get(storage.data_ptr())
        if self.forward and owner is not None and storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.by_layer[owner] += storage.nbytes()
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.forward = False
        return tensor


def _bytes(tensors: Any) -> int:
    """Of distinct storages."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def _optimizer_bytes(optimizer: Any, weights: set[int]) -> int:
    """Main parameters that are no part of the weights, and the moments."""
    total = 0
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in weights:
                    total += parameter.numel() * parameter.element_size()
        for state in inner.state.values():
            moments = (state["exp_avg"], state["exp_avg_sq"])
            total += sum(m.numel() * m.element_size() for m in moments)
    return total


def _groups() -> dict[str, list[int]]:
    """This rank's groups by the names of a plan."""
    return {name: dist.get_process_group_ranks(group) for name, group in groups().items()}


def measure(out: Path, *, model: Path, config: dict[str, Any], batch: Batch) -> None:
    """One update with counters; this rank's figures go to rank{n}.json."""
    learner = make_learner(model, config)
    chunks: Any = learner.model if isinstance(learner.model, list) else [learner.model]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    held = {p.untyped_storage().data_ptr() for p in parameters}
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    held |= {b.param_data.untyped_storage().data_ptr() for b in buffers}
    layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
    saved = SavedBytes(layers, held)
    estimator = Estimator.model_validate({})
    exchanged = ExchangeCounts(groups())
    with saved.hooks, exchanged:
        learner.train(share(batch, learner, estimator), estimator, 1.0)
    figures = {
        "stage": learner.world.pp_rank,
        "dense": sum(p.numel() for p in parameters if getattr(p, "allreduce", True)),
        "expert": sum(p.numel() for p in parameters if not getattr(p, "allreduce", True)),
        "weights": _bytes(b.param_data for b in buffers),
        "gradients": _bytes(b.grad_data for b in buffers),
        "optimizer": _optimizer_bytes(learner.optimizer, held),
        "saved_by_layer": saved.by_layer,
        "passes": saved.passes,
        "tokens": saved.tokens,
        "groups": _groups(),
        "exchanged": exchanged.counts,
    }
    (out / f"rank{learner.world.rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()
