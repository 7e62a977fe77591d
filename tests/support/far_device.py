"""A device that is far away, on a CPU: CUDA's rules for where tensors are and what waits for them.

Its tensors hold ordinary CPU memory, so that every value is right; but they mix with CPU tensors as
little as CUDA's do, and what makes the host wait for the device is counted, as
torch.cuda.set_sync_debug_mode would tell it: reading a value, a result whose size depends on
values, a copy that does not say non_blocking.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FAR = torch.device("lazy")
"""Runs autograd in the calling thread, and has no operations of its own."""

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default: 1,
    aten.nonzero.default: 1,
    aten.masked_select.default: 1,
    aten.equal.default: 1,
    aten.bincount.default: 2,  # the least value, and the largest
    aten._unique2.default: 1,
    aten.unique_dim.default: 1,
    aten.unique_consecutive.default: 1,
    aten.repeat_interleave.Tensor: 1,
}
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class FarTensor(torch.Tensor):
    """A tensor there. held: its numbers, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> FarTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=FAR,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FarTensor({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class FarDevice(TorchDispatchMode):
    """Makes FAR a device while entered. waits: how often the host waited, by what for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._made = _MadeOfNumbers()

    def __enter__(self) -> FarDevice:
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._made.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        waits = _waits(func, args, kwargs)
        if waits:
            self.waits[func.name().removeprefix("aten::")] += waits
        return _run(func, args, kwargs)


class _MadeOfNumbers(TorchFunctionMode):
    """Makes tensors of Python's numbers, and the reverse, as torch does: by blocking copies."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_far(kwargs.get("device")):
            return func(*args, **(kwargs | {"device": torch.device("cpu")})).to(FAR)
        if func is torch.Tensor.new_tensor and isinstance(args[0], FarTensor):
            return torch.tensor(*args[1:], **({"dtype": args[0].dtype} | kwargs)).to(FAR)
        if func is torch.Tensor.tolist and isinstance(args[0], FarTensor):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers there, as if they had been computed there."""
    return FarTensor(tensor.detach().clone())


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == FAR.type


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How often this operation makes the host wait."""
    if func is aten._to_copy.default:
        to = kwargs.get("device")
        moves = to is not None and _is_far(to) != isinstance(args[0], FarTensor)
        return int(moves and not kwargs.get("non_blocking"))
    if func is aten.copy_.default:
        moves = isinstance(args[0], FarTensor) != isinstance(args[1], FarTensor)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return int(moves and blocking)
    if not any(isinstance(leaf, FarTensor) for leaf in tree_leaves((args, kwargs))):
        return 0
    if func in INDEXED:
        index = [each for each in args[1] if each is not None]
        masks = [each for each in index if each.dtype in (torch.bool, torch.uint8)]
        near = [each for each in index if not isinstance(each, FarTensor)]
        return len(masks) + len(near)  # an index here is copied there
    return WAITS.get(func, 0)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers held, and bring its results to where CUDA would."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    away = [tensor for tensor in tensors if isinstance(tensor, FarTensor)]
    to = kwargs.get("device")
    moves = func in (aten._to_copy.default, aten.copy_.default)
    if away and not moves and func not in INDEXED:
        near = [t.shape for t in tensors if not isinstance(t, FarTensor) and t.dim() > 0]
        assert not near, f"{func}: tensors of the CPU among those of a device, {near}"
    lands = bool(away) if to is None else _is_far(to)
    if func is aten.copy_.default:
        lands = isinstance(args[0], FarTensor)
    if func in (aten._local_scalar_dense.default, aten.equal.default):
        lands = False
    if _is_far(to):
        kwargs = kwargs | {"device": torch.device("cpu")}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    known = {id(tensor.held): tensor for tensor in away}

    def unwrap(leaf: Any) -> Any:
        return leaf.held if isinstance(leaf, FarTensor) else leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = known.get(id(leaf))  # an operation in place returns what it was given
        return FarTensor(leaf) if found is None else found

    args, kwargs = tree_map(unwrap, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(wrap, out) if lands else out
