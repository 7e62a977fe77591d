"""Describes multi-head latent attention (MLA, DeepSeek-AI 2024, arXiv:2405.04434). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latent:
    """Holds the sizes of attention whose keys and values are products of one latent of a token.

    query_rank: features of the latent that makes the queries; None: the layer's input makes them.
    rank: of the latent that makes keys and values. plain: of a head's query and key, those that
    rotary positions leave; turning: those that they turn, in one key for all heads. value: of a
    head's value.
    """

    query_rank: int | None
    rank: int
    plain: int
    turning: int
    value: int

    @property
    def query(self) -> int:
        """Returns the features of a head's query, and of its key."""
        return self.plain + self.turning

    @property
    def kept(self) -> int:
        """Returns what a server keeps of a token and layer: its latent and the key that turns."""
        return self.rank + self.turning

    def shapes(self, hidden: int, heads: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of an attention's Hugging Face tensors, by Megatron's names."""
        queries = heads * self.query
        rank = self.query_rank or 0
        sizes: dict[str, tuple[int, ...]] = {
            "linear_q_proj": (queries, hidden),
            "linear_q_down_proj": (rank, hidden),
            "q_layernorm": (rank,),
            "linear_q_up_proj": (queries, rank),
            "linear_kv_down_proj": (self.kept, hidden),
            "kv_layernorm": (self.rank,),
            "linear_kv_up_proj": (heads * (self.plain + self.value), self.rank),
            "linear_proj": (hidden, heads * self.value),
        }
        return {f"self_attention.{name}.weight": shape for name, shape in sizes.items()}
