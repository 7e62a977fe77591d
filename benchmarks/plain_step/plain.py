"""One training step of Megatron-Core as it comes: GPTModel with labels, its loss, its optimizer.

stock: Megatron's own local layers on [samples, tokens], all samples of one length, so that nothing
is padded. packed: this project's layers and packing, which is what a CPU or several lengths need;
the loss stays Megatron's.

Axes: B samples, L positions of each, S = B L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_opd.checkpoint.convert import load_weights, source_of
from megatron_opd.config.learner import LearnerConfig
from megatron_opd.learner.learner import MegatronLearner
from megatron_opd.learner.model import DTYPES, build_model, ddp_config, transformer_config
from megatron_opd.learner.optimizer import build_optimizer, connect_pipeline_schedule
from megatron_opd.models.spec import ModelSpec

Layers = Literal["stock", "packed"]


@dataclass(frozen=True)
class PlainMicro:
    """Holds a micro-batch: ids and the tokens they must predict, [B, L] or packed [1, S].

    packing: what the packed layers need to know of the segments; None for stock ones.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    packing: Any


class PlainStep:
    """Trains the model of `learner` on next tokens, in the same process and world."""

    def __init__(self, learner: MegatronLearner, config: LearnerConfig, layers: Layers) -> None:
        self.config, self.layers, self.world = config, layers, learner.world
        self._mode = learner._device_mode
        with self._mode:
            if layers == "packed":
                self.model = build_model(learner.spec, self.world, config)
            else:
                self.model = [_stock_model(learner.spec, config)]
            load_weights(
                self.model, learner.spec, self.world, source_of(learner.source, learner.spec, None)
            )
            self.optimizer = build_optimizer(config.optimizer, self.model, DTYPES[config.dtype])
        connect_pipeline_schedule(self.model, self.optimizer)

    def micros(self, ids_BL: torch.Tensor, per_micro: int) -> list[PlainMicro]:
        """Cut samples [B, L + 1] into micro-batches of `per_micro` samples."""
        return [self._micro(part) for part in ids_BL.split(per_micro)]

    def _micro(self, ids_BL: torch.Tensor) -> PlainMicro:
        ids, labels = ids_BL[:, :-1].contiguous(), ids_BL[:, 1:].contiguous()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        if self.layers == "stock":
            return PlainMicro(ids, labels, positions, None)
        packing = self.world.pack_layout(None, 1).packing((ids.shape[1],) * len(ids))
        flat = (each.reshape(1, -1) for each in (ids, labels, positions))
        return PlainMicro(*flat, packing)

    def train(self, micros: Sequence[PlainMicro]) -> float:
        """Make one optimizer step; returns the mean loss in nats a token."""
        with self._mode:
            for chunk in self.model:
                chunk.zero_grad_buffer()
            outputs: list[dict[str, float]] = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=iter(micros),
                model=self.model,
                num_microbatches=len(micros),
                seq_length=micros[0].ids.shape[1],
                micro_batch_size=len(micros[0].ids),
                forward_only=False,
            )
            self.optimizer.step()
        return sum(out["loss"] for out in outputs) / sum(out["tokens"] for out in outputs)


def _forward(micros: Iterator[PlainMicro], module: Any) -> tuple[torch.Tensor, Any]:
    micro = next(micros)
    named = {} if micro.packing is None else {"packed_seq_params": micro.packing}
    losses = module(micro.ids, micro.positions, None, labels=micro.labels, **named)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        total, count = losses.sum(), torch.tensor(losses.numel())
        return total, count, {"loss": float(total), "tokens": int(count)}

    return losses, loss


def _stock_model(spec: ModelSpec, config: LearnerConfig) -> DistributedDataParallel:
    """Build GPTModel with Megatron's own layers and rotary angles."""
    from megatron_opd.config.kernels import choose_kernels

    megatron = transformer_config(spec, config, choose_kernels(False), cuda=False)
    layers = get_gpt_layer_local_spec(qk_layernorm=spec.family.qk_norm, normalization="RMSNorm")
    model = GPTModel(
        megatron,
        layers,
        vocab_size=spec.padded_vocab(1),
        max_sequence_length=spec.max_position,
        position_embedding_type="rope",
        rotary_base=spec.rope.theta,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=spec.tied,
        parallel_output=True,
    )
    return DistributedDataParallel(
        megatron, ddp_config(config, cuda=False), model.to(dtype=megatron.params_dtype)
    )
