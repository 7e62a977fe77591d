"""Counts the floating-point operations that a model needs, and knows what a GPU can do at most.

Model FLOPs as in PaLM (Chowdhery et al. 2022, App. B): only matrix products count, 2 a b c for
[a, b] times [b, c]; recomputation and filler do not count, however a learner is set. A forward pass
takes

    2 S N + 2 L H (d + e) P + 2 R h V

with S positions, N matrix elements of the layers that one position meets (of its experts: those
chosen), P (query, key) pairs in each of L layers of H heads, of d features a query and e a value,
of which those of a window are fewer and those of a gated delta net none (for each position 3
products of its state instead, as the rule goes step by step), and R positions whose log-probs are
read by a head of V ids over h features. Where PaLM counts n^2 pairs and n head rows of a sequence
of n, a causal one has n (n + 1) / 2 pairs here, and the head works for responses alone. A backward
pass takes twice as much: a product for each operand's gradient.

Equal to what torch.utils.flop_counter counts of transformers' models
(tests/unit/sizing/test_flops.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_opd.models.spec import ModelSpec
from megatron_opd.sizing.served import size_of

# Dense bfloat16 TFLOP/s by the name that torch.cuda.get_device_name gives: NVIDIA's data sheets,
# which for Hopper state twice as much "with sparsity".
PEAK_BF16_TFLOPS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H200": 989.5,
}


@dataclass(frozen=True, slots=True)
class Work:
    """Counts a pass: S positions, P (query, key) pairs of a layer, R scored positions.

    The axes of the module's formula, without filler. windowed_pairs: those of a windowed layer.
    """

    positions: int
    pairs: int
    scored: int
    windowed_pairs: int = 0

    @classmethod
    def of(cls, samples: Iterable[tuple[int, int]], window: int | None = None) -> Work:
        """Add up samples of (prompt, response) tokens; a last response token is never an input.

        window: positions that a query of a windowed layer sees.
        """
        lengths = [(prompt + response - 1, response) for prompt, response in samples]
        return cls(
            sum(length for length, _ in lengths),
            sum(_pairs(length, length) for length, _ in lengths),
            sum(response for _, response in lengths),
            sum(_pairs(length, window or length) for length, _ in lengths),
        )


def _pairs(length: int, window: int) -> int:
    """Count the (query, key) pairs of a sequence whose queries see `window` positions at most."""
    full = min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def forward_flops(spec: ModelSpec, work: Work) -> int:
    """Count the model FLOPs of one forward pass."""
    windowed = sum(spec.windowed)
    pairs = (spec.attention_layers - windowed) * work.pairs + windowed * work.windowed_pairs
    head = 2 * spec.hidden_size * spec.vocab_size
    rule = 0 if spec.delta_net is None else spec.delta_net.rule_products * sum(spec.delta_layers)
    return (
        2 * work.positions * rule
        + 2 * work.positions * size_of(spec).active_layer_elements
        + 2 * spec.num_heads * spec.pair_features * pairs
        + head * work.scored
    )


def train_flops(spec: ModelSpec, work: Work) -> int:
    """Count the model FLOPs of a forward pass and of its backward pass, which costs two."""
    return 3 * forward_flops(spec, work)


def mfu(flops: float, seconds: float, gpus: int, peak_tflops: float | None) -> float | None:
    """Return the model FLOP utilisation, of 1: `flops` in `seconds` against all GPUs' peak.

    None where no peak is known.
    """
    if peak_tflops is None:
        return None
    return flops / seconds / (gpus * peak_tflops * 1e12)
