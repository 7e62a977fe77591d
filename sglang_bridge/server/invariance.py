"""Computes on a CPU so that rows do not depend on how many rows there are.

A server batches what happens to arrive, so a request's log-probs are reproducible only if each row
of a product is the same bits whatever stands beside it. MKL's float32 products are, from a few rows
and two columns on; with fewer it takes kernels that add in another order. Such products are
therefore computed with zeros beside them.

Of sigmoids and what is made of them torch computes whole vectors in one way, and the numbers that
are left over at the end of a tensor in another: sizes of rows that are no multiple of a vector, as
few experts or the one gate of a shared expert, make that depend on the rows. They are computed from
exponentials and hyperbolic tangents here, which do not.

What the rest of a forward pass does on a CPU (norms, softmax, attention, one request at a time)
works row by row.

SGLang's own batch-invariant operations (`enable_batch_invariant_mode`) are Triton kernels, and do
the same on a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch

MIN_ROWS, MIN_COLUMNS = 16, 2
# From the least to more than a decode step or a chunk of a prefill has, multiples of no kernel's
# tile among them.
CHECKED_ROWS = (MIN_ROWS, MIN_ROWS + 1, 33, 64, 100, 256)

_library: torch.library.Library | None = None  # registrations end with it


class NotInvariant(RuntimeError):
    """Reports that this machine's products depend on the number of rows."""


def enable() -> None:
    """Makes products and activations of CPU tensors in this process invariant. Safe to repeat."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is being replaced
            _library.impl("mm", _mm, "CPU")
            _library.impl("addmm", _addmm, "CPU")
            for name, function in ACTIVATIONS.items():
                _library.impl(name, function, "CPU")


def check(weights: Iterable[torch.Tensor]) -> None:
    """Multiplies random inputs with a matrix of every shape and dtype among `weights`.

    weights: any number of dimensions; those with two are used as [outputs, inputs], those with
    three as one such matrix each. The first one's dtype is also that in which quantised ones, of
    one byte a number, are multiplied. Raises NotInvariant naming the first shape that fails.
    """
    tried: set[tuple[Any, ...]] = set()
    dtype: torch.dtype | None = None
    for weight in weights:
        dtype = dtype or weight.dtype
        matrix = weight[0] if weight.dim() == 3 else weight
        kind = dtype if weight.itemsize == 1 else weight.dtype
        key = (*matrix.shape, kind)
        if matrix.dim() != 2 or not kind.is_floating_point or key in tried:
            continue
        tried.add(key)
        _check_one(matrix.to(kind))


def _check_one(weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(CHECKED_ROWS), weight.shape[1], generator=generator).to(weight.dtype)
    all_rows = torch.nn.functional.linear(rows, weight)
    for count in (1, *CHECKED_ROWS):
        first = len(rows) - count
        some = torch.nn.functional.linear(rows[first:], weight)
        if not torch.equal(some, all_rows[first:]):
            raise NotInvariant(
                "--enable-deterministic-inference: on this machine the product of a matrix of "
                f"{weight.dtype} {list(weight.shape)} depends on the number of rows ({count} and "
                f"{len(rows)} differ); float32 does not where torch multiplies with MKL"
            )


# The overload that writes into a given tensor is not replaced: it is what is called here.


def _mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    (rows, inputs), columns = a_MK.shape, b_KN.shape[1]
    if rows < MIN_ROWS:
        a_MK = torch.cat([a_MK, a_MK.new_zeros(MIN_ROWS - rows, inputs)])
    if columns < MIN_COLUMNS:
        b_KN = torch.cat([b_KN, b_KN.new_zeros(inputs, MIN_COLUMNS - columns)], 1)
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    return torch.mm(a_MK, b_KN, out=out)[:rows, :columns].contiguous()


def _addmm(
    bias: torch.Tensor,
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return _mm(a_MK, b_KN) * alpha + bias * beta


def _in_float32(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute `function` in float32 at least, for a result of the argument's own type."""

    @wraps(function)
    def computed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return function(x.to(wide), *args, **kwargs).to(x.dtype if x.is_floating_point() else wide)

    return computed


@_in_float32
def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


@_in_float32
def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


@_in_float32
def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@_in_float32
def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = x * beta
    soft = torch.log1p(torch.exp(scaled.clamp(max=threshold))) / beta
    return torch.where(scaled > threshold, x, soft)


ACTIVATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_": lambda x: x.copy_(_sigmoid(x)),
    "silu": _silu,
    "silu_": lambda x: x.copy_(_silu(x)),
    "gelu": _gelu,
    "softplus": _softplus,
}
"""By the name of torch's operator."""
