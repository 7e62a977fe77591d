"""Describes the gated delta net (Yang et al. 2024, arXiv:2412.06464). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Holds the sizes of layers that keep a state instead of keys and values.

    keys, values: heads of queries and keys, and of values, of which each key has equally many;
    key_dim, value_dim: features of one. width: positions that the convolution before them sees, a
    token's own included.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def key_features(self) -> int:
        """Returns the features of all heads' keys, and of all heads' queries."""
        return self.keys * self.key_dim

    @property
    def value_features(self) -> int:
        """Returns the features of all heads' values."""
        return self.values * self.value_dim

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Returns the features of queries, keys and values, which the convolution mixes."""
        return self.key_features, self.key_features, self.value_features

    @property
    def rule_products(self) -> int:
        """Returns the products of a position: what its key reads, what it writes, its query reads.

        Counted step by step; kernels that go by chunks make more of them.
        """
        return 3 * self.value_features * self.key_dim

    def state_bytes(self, tp: int, conv_bytes: int, state_bytes: int = 4) -> int:
        """Count what a server's rank keeps of a sequence and layer, however long that is.

        conv_bytes, state_bytes: of a number of the convolution's last inputs, and of the state.
        """
        window = (self.width - 1) * sum(self.mixed) * conv_bytes
        state = self.value_features * self.key_dim * state_bytes
        return (window + state) // tp

    def shapes(self, hidden: int) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Return the shapes of a layer's Hugging Face tensors, in the order of their row's names.

        By Megatron's name.
        """
        by_head = (self.values, hidden)
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "in_proj.weight": (
                (sum(self.mixed), hidden),
                (self.value_features, hidden),
                by_head,
                by_head,
            ),
            "conv1d.weight": ((sum(self.mixed), 1, self.width),),
            "dt_bias": ((self.values,),),
            "A_log": ((self.values,),),
            "out_norm.weight": ((self.value_dim,),),
            "out_proj.weight": ((hidden, self.value_features),),
        }
        return {f"self_attention.{name}": each for name, each in shapes.items()}
