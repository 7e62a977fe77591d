"""Describes a served model by what its memory and its arithmetic follow from: heads and tensors.

Of a student the tensors are those that config.json describes, of a teacher those that its files
hold, whatever they are called. Torch-free.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_opd.models.delta_net import DeltaNet
from megatron_opd.models.spec import ModelSpec
from megatron_opd.models.tensors import Shape, layer_rows, row_shapes

EXPERT = ".experts."
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Describes `count` tensors of one shape. name: theirs, with N for each number.

    bits: of a number as it is stored, with its share of a scale, where a server keeps it so (a
    quantised checkpoint's); None: the server's dtype has a say. exact: servers hold them in
    float32, whatever their dtype.
    """

    name: str
    shape: Shape
    count: int
    bits: float | None = None
    exact: bool = False

    @property
    def elements(self) -> int:
        """Returns the elements of all of them."""
        return prod(self.shape) * self.count

    @property
    def is_expert(self) -> bool:
        """Returns whether they belong to experts that a router chooses from."""
        return EXPERT in self.name

    @property
    def is_layer_matrix(self) -> bool:
        """Returns whether a token is multiplied with them in some layer."""
        return ".layers." in self.name and len(self.shape) > 1


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Describes a model. heads: of attention; head_dim, ffn_size, hidden_size: in features.

    num_experts, experts_per_token: 0 without experts. shared_ffn_size: of the experts that every
    token visits, 0 without. latent_kept: numbers of a token that a layer of latent attention keeps
    whole on every rank; 0: keys and values are kept, by heads. delta_layers: those that keep the
    state of delta_net instead. whole_embedding: every rank has all of it.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tensors: tuple[TensorKind, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    shared_ffn_size: int = 0
    latent_kept: int = 0
    delta_net: DeltaNet | None = None
    delta_layers: int = 0
    whole_embedding: bool = False

    @property
    def parameters(self) -> int:
        """Returns the numbers of all tensors."""
        return sum(kind.elements for kind in self.tensors)

    @property
    def expert_parameters(self) -> int:
        """Returns those of all experts."""
        return sum(kind.elements for kind in self.tensors if kind.is_expert)

    @property
    def active_parameters(self) -> int:
        """Returns those that one token's forward pass uses: the chosen experts, all else."""
        experts = self.expert_parameters
        return self.parameters - experts + self._chosen(experts)

    @property
    def active_layer_elements(self) -> int:
        """Returns the elements of all layers' matrices that one position is multiplied with."""
        matrices = [kind for kind in self.tensors if kind.is_layer_matrix]
        experts = sum(kind.elements for kind in matrices if kind.is_expert)
        return sum(kind.elements for kind in matrices) - experts + self._chosen(experts)

    def _chosen(self, elements: int) -> int:
        return elements * self.experts_per_token // self.num_experts if self.num_experts else 0


Sized = ModelSpec | ModelSize


def size_of(model: Sized) -> ModelSize:
    """Return a model's size, of a student's from what config.json says."""
    return model if isinstance(model, ModelSize) else _size_of_spec(model)


@cache
def _size_of_spec(spec: ModelSpec) -> ModelSize:
    counts: Counter[tuple[str, Shape, bool]] = Counter()
    for layer in range(spec.num_layers):
        for _, row in layer_rows(spec, layer):
            for name, shape in zip(row.hf, row_shapes(spec, row), strict=True):
                name = f"model.layers.N.{name.replace('{e}', 'N')}"
                counts[name, shape, row.exact] += spec.num_experts if row.expert else 1
    for row in spec.family.top:
        if not (spec.tied and row.hf == ("lm_head.weight",)):
            counts[row.hf[0], row_shapes(spec, row)[0], False] += 1
    return ModelSize(
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.ffn_size,
        spec.vocab_size,
        tuple(TensorKind(*each[:2], count, exact=each[2]) for each, count in counts.items()),
        spec.num_experts,
        spec.experts_per_token,
        spec.shared_ffn_size,
        0 if spec.latent is None else spec.latent.kept,
        spec.delta_net,
        sum(spec.delta_layers),
        whole_embedding=spec.family.scaled_embedding,
    )


def kinds_of(stored: Iterable[tuple[str, Shape, float | None]]) -> tuple[TensorKind, ...]:
    """Return the kinds of tensors given by name, shape and bits (see TensorKind)."""
    counts = Counter((_NUMBER.sub(".N", name), shape, bits) for name, shape, bits in stored)
    return tuple(TensorKind(*each[:2], count, each[2]) for each, count in counts.items())
