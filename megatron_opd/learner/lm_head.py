"""Replaces the LM head: one for a padded vocabulary, and one that returns its input, not logits.

The head's product moves into the loss (losses/lean.py), which needs it one block at a time. The
parameters, their names and Megatron's marks on them (tensor parallel, shared embedding) stay as
they are, so checkpoints, gradient norms and the optimizer see no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_opd.losses.passes import HeadSlice


class PaddedHead(ColumnParallelLinear):
    """Masks a ColumnParallelLinear's last outputs that are not ids: their logits are -inf.

    Their probability is exactly 0, and no gradient reaches the rows of the weight that pad it.
    """

    num_ids: int

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits [S, B, v]."""
        assert not runtime_gather_output, "num_ids counts this rank's slice alone"
        logits, bias = super().forward(input_, weight, runtime_gather_output)
        padding_v = torch.arange(logits.shape[-1], device=logits.device) >= self.num_ids
        return logits.masked_fill(padding_v, -torch.inf), bias


def hide_padded_ids(model: GPTModel, vocab_size: int) -> None:
    """Tell the head how many of its outputs are ids, where the vocabulary is padded.

    The lean head is told by the loss: see `head_slice`.
    """
    model.real_vocab_size = vocab_size  # type: ignore[assignment]
    if not model.post_process or vocab_size == model.vocab_size:
        return
    head: Any = model.output_layer
    per_rank = head.output_size_per_partition
    first = head.tp_group.rank() * per_rank
    head.num_ids = min(max(vocab_size - first, 0), per_rank)
    # Not a new module: the weight, its marks and sharded_state_dict stay Megatron's own.
    head.__class__ = PaddedHead


class LeanHead(ColumnParallelLinear):
    """Stops a ColumnParallelLinear before its product."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return [S, B, H] on every tensor-parallel rank, from this rank's part of S or all of it.

        Either region adds up, in the backward pass, the ranks' gradients of the input: each rank
        has the part of its own vocabulary shard. weight: the tied embedding, see `head_weight`.
        """
        region: Any = copy_to_tensor_model_parallel_region
        if self.sequence_parallel:
            region = gather_from_sequence_parallel_region
        return region(input_, group=self.tp_group), None


def install_lean_head(model: GPTModel) -> None:
    """Make `model(...)` return the head's input [B, S, H] on the last pipeline stage.

    Before or after wrapping in DistributedDataParallel, and with or without sequence parallelism;
    nothing happens on other stages. ValueError for heads that are used in another way too.
    """
    if model.config.mtp_num_layers:
        raise ValueError(
            "learner.megatron.mtp_num_layers must be null with learner.logp lean, got "
            f"{model.config.mtp_num_layers}: multi-token prediction needs this head's logits"
        )
    if model.config.defer_embedding_wgrad_compute:
        raise ValueError(
            "learner.megatron.defer_embedding_wgrad_compute must be false with learner.logp lean, "
            "got true: the loss's backward pass adds the head's weight gradient"
        )
    if model.post_process:
        # Not a new module: the weight, its marks and sharded_state_dict stay Megatron's own.
        head: Any = model.output_layer
        head.__class__ = LeanHead


def head_weight(model: GPTModel) -> torch.Tensor:
    """Return this rank's [v, H] of the head, on the last pipeline stage.

    The embedding's own parameter where it is tied; with more than one stage, the last stage's copy
    of it, whose gradient Megatron adds to the first stage's (finalize_model_grads).
    """
    if not model.post_process:
        raise ValueError("only the last pipeline stage holds the head")
    tied = model.share_embeddings_and_output_weights
    weight: Any = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def head_slice(model: GPTModel) -> HeadSlice:
    """Return this rank's slice of the head, on the last pipeline stage."""
    group: Any = ps.get_tensor_model_parallel_group()
    return HeadSlice(head_weight(model), group, int(model.real_vocab_size))  # type: ignore[arg-type]
