"""A card on a machine that has none: tensors that say cuda:0 and hold ordinary CPU memory.

Every value is right, so that code which reads values runs to its end; and what a real card would
make the host wait for is counted, with the place in our code or an engine's that led to it. While a
FakeCard is entered torch.cuda answers as one card does, without Triton's kernels.

Inside torch the tensors are of the device "lazy", which has no operations of its own and runs
autograd in the calling thread; Python sees cuda. What a CUDA kernel waits for within itself is not
seen, and what differs between kernels of the two devices is computed as a CPU does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.paths import ROOT

CARD = torch.device("cuda", 0)
INSIDE = torch.device("lazy")
CPU = torch.device("cpu")

Kind = Literal["read", "copy", "synchronize", "unpinned", "mixed"]
"""read: the host waits for a value or for a size that depends on values. copy: it waits for a copy
to the card. synchronize: it asks to wait. unpinned: a copy that says it need not be waited for, but
whose host memory is not pinned. mixed: an operation on tensors of both devices, which CUDA refuses,
or an index on the other device, which it copies."""
WAITS: tuple[Kind, ...] = ("read", "copy", "synchronize")

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default: 1,
    aten.nonzero.default: 1,
    aten.masked_select.default: 1,
    aten.equal.default: 1,
    aten.bincount.default: 2,  # the least value, and the largest
    aten._unique2.default: 1,
    aten.unique_dim.default: 1,
    aten.unique_consecutive.default: 1,
}
PUTS = (aten.index_put.default, aten.index_put_.default)
INDEXED = (aten.index.Tensor, *PUTS)
MOVES = (aten._to_copy.default, aten.copy_.default)


@dataclass(frozen=True, order=True)
class Line:
    """what: the operation. place: file:line (function), innermost of ours or of an engine's."""

    kind: Kind
    what: str
    place: str


class CardTensor(torch.Tensor):
    """A tensor there. held: its numbers, on the CPU."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=INSIDE,
        )
        made.held = held
        return made

    device: Any = property(lambda _: CARD)
    is_cuda: Any = property(lambda _: True)
    is_cpu: Any = property(lambda _: False)

    def record_stream(self, stream: Any) -> None:
        """All runs in order."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CardTensor({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers there, as if they had been computed there."""
    return CardTensor(tensor.detach().clone())


class FakeCard(TorchDispatchMode):
    """Makes CARD a device while entered. lines: what was found, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[Line] = Counter()
        self._calls = _Calls()
        self._patches = contextlib.ExitStack()

    @property
    def waits(self) -> Counter[str]:
        """How often the host waited, by what for."""
        found: Counter[str] = Counter()
        for line, count in self.lines.items():
            if line.kind in WAITS:
                found[line.what] += count
        return found

    def note(self, kind: Kind, what: str, count: int = 1) -> None:
        """Add what the running code just did."""
        self.lines[Line(kind, what, _place())] += count

    def __enter__(self) -> FakeCard:
        cuda = _cuda(self)
        self._patches.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        # a torch that was built for CUDA asks its optimizers' stream there
        self._patches.enter_context(
            mock.patch.object(torch.accelerator, "current_stream", cuda["current_stream"])
        )
        self._patches.enter_context(mock.patch.object(importlib.util, "find_spec", _without_triton))
        self._patches.enter_context(mock.patch.object(dist, "init_process_group", _by_gloo))
        self._patches.enter_context(
            mock.patch.object(torch.autograd, "_engine_run_backward", self._run_backward)
        )
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._calls.__exit__(*raised)
        self._patches.close()

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Let what autograd calls in Python see the card: a mode is off while it is asked."""
        with self._calls:
            return _engine_run_backward(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        what = func.name().removeprefix("aten::")
        for kind, count in _costs(func, args, kwargs).items():
            self.note(kind, what, count)
        return _run(func, args, kwargs)


def _costs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counter[Kind]:
    """What this operation makes the host do."""
    found: Counter[Kind] = Counter()
    if func in MOVES:
        kind = _move(func, args, kwargs)
        found.update([] if kind is None else [kind])
        return found
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    near = [tensor for tensor in tensors if not isinstance(tensor, CardTensor)]
    if len(near) == len(tensors):
        return found
    if func in PUTS and _is_number(args[2]):
        # a number of the host: CUDA fills in by a mask, and else copies it there
        near = [tensor for tensor in near if tensor is not args[2]]
        if _is_one_mask(args[1]):
            return found
        found["copy"] = 1
    if func in INDEXED:
        found["read"] = sum(_is_mask(each) for each in args[1])
    if func is aten.repeat_interleave.Tensor:
        found["read"] = int(kwargs.get("output_size") is None)
    found["read"] += READS.get(func, 0)
    if func.namespace != "c10d":
        found["mixed"] = int(any(tensor.dim() > 0 for tensor in near))
    return +found


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_one_mask(indices: Sequence[Any]) -> bool:
    """Whether nothing but one mask of the card chooses."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and _is_mask(given[0]) and isinstance(given[0], CardTensor)


def _is_number(value: torch.Tensor) -> bool:
    return value.dim() == 0 and not isinstance(value, CardTensor)


def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """What a copy costs; None: nothing, or it stays on one device."""
    if func is aten.copy_.default:
        target, source = args[:2]
        there, asynchronous = isinstance(target, CardTensor), bool(args[2:3] and args[2])
        host = source if there else target
    else:
        source, to = args[0], kwargs.get("device")
        there = isinstance(source, CardTensor) if to is None else _is_card(to)
        asynchronous, host = bool(kwargs.get("non_blocking")), source
    if there == isinstance(source, CardTensor):
        return None
    if not asynchronous:
        return "copy" if there else "read"
    makes_pinned = func is aten._to_copy.default and not there
    return None if makes_pinned or _is_pinned(host) else "unpinned"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers held, and bring its results to where CUDA would."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    away = [tensor for tensor in tensors if isinstance(tensor, CardTensor)]
    to = kwargs.get("device")
    lands = bool(away) if to is None else _is_card(to)
    if func is aten.copy_.default:
        lands = isinstance(args[0], CardTensor)
    if func in (aten._local_scalar_dense.default, aten.equal.default):
        lands = False
    if _is_card(to):
        kwargs = kwargs | {"device": CPU}
    pins = bool(kwargs.get("pin_memory")) and not lands
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    known = {id(tensor.held): tensor for tensor in away}

    def unwrap(leaf: Any) -> Any:
        return leaf.held if isinstance(leaf, CardTensor) else leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        found = known.get(id(leaf))  # an operation in place returns what it was given
        return CardTensor(leaf) if found is None else found

    args, kwargs = tree_map(unwrap, (args, kwargs))
    out = func(*args, **kwargs)
    if func is aten._to_copy.default and away and not lands and kwargs.get("non_blocking"):
        pins = True  # as torch makes the host's side of a copy that is not waited for
    if pins:
        out.is_pinned_here = True
    return tree_map(wrap, out) if lands else out


class _Calls(TorchFunctionMode):
    """Turns cuda into INSIDE on the way into torch, and answers what only Python is to see."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args and isinstance(args[0], CardTensor) else None
        if func in _MADE_OF_NUMBERS and own is None and _is_card(kwargs.get("device")):
            return func(*args, **(kwargs | {"device": CPU})).to(INSIDE)
        if func is torch.Tensor.new_tensor and own is not None:
            return torch.tensor(*args[1:], **({"dtype": own.dtype} | kwargs)).to(INSIDE)
        if func is torch.Tensor.cuda:
            return args[0].to(INSIDE, non_blocking=kwargs.get("non_blocking", False))
        if func is torch.Tensor.pin_memory:
            return _pinned(args[0])
        if func is torch.Tensor.is_pinned:
            return _is_pinned(args[0])
        if own is not None:
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                args = (own, _on_device(args[1]), *args[2:])
            if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
                # the number is a tensor of the host first, as on CUDA alone
                args = (*args[:2], torch.tensor(args[2], dtype=own.dtype))
            if func is torch.Tensor.tolist:
                return own.cpu().tolist()
            if func is torch.Tensor.type and len(args) == 1:
                return own.held.type().replace("torch.", "torch.cuda.", 1)
            if func in _OF_MEMORY:
                return func(own.held)
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                own.held = args[1].held
        if func is torch.Tensor.to:
            args = tuple(INSIDE if _names_card(each) else each for each in args)
        if _is_card(kwargs.get("device")):
            kwargs["device"] = INSIDE
        return func(*args, **kwargs)


_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_OF_MEMORY = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage)


def _is_card(device: Any) -> bool:
    """Whether this is how Python or torch names the card."""
    if isinstance(device, int):
        return True
    return device is not None and torch.device(device).type in (CARD.type, INSIDE.type)


def _names_card(argument: Any) -> bool:
    """Whether a positional argument of Tensor.to does."""
    is_name = isinstance(argument, str | torch.device)
    return is_name and torch.device(argument).type == CARD.type


def _on_device(index: Any) -> Any:
    """An index whose lists are brought to the card, as torch does without asking any mode."""
    if isinstance(index, tuple):
        return tuple(_on_device(each) for each in index)
    return torch.as_tensor(index).to(INSIDE) if isinstance(index, list | np.ndarray) else index


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    copy: Any = tensor.clone()
    copy.is_pinned_here = True
    return copy


def _is_pinned(tensor: Any) -> bool:
    return getattr(tensor, "is_pinned_here", False)


def _place() -> str:
    """Where the running code is: the innermost frame of ours or of an engine's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = _shown(frame.f_code.co_filename)
        if path is not None:
            node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            during = "" if node is None else f" in the backward pass of {node.name()}"
            return f"{path}:{frame.f_lineno} ({frame.f_code.co_name}){during}"
        frame = frame.f_back
    raise AssertionError("no frame of ours")


_PACKAGES, _ENGINES = "site-packages/", ("megatron/core/", "sglang/")


def _shown(path: str) -> str | None:
    """The path as a reader knows it; None: of torch, of Python, or of this file."""
    if path == __file__:
        return None
    _, found, inside = path.rpartition(_PACKAGES)
    if found:
        return inside if inside.startswith(_ENGINES) else None
    return path.removeprefix(f"{ROOT}/") if path.startswith(f"{ROOT}/") else None


def _without_triton(name: str, *package: str) -> Any:
    return None if name == "triton" else _find_spec(name, *package)


def _by_gloo(backend: str, *args: Any, **kwargs: Any) -> None:
    """Form the world whose ranks' cards would talk by NCCL."""
    _init_process_group("gloo" if backend == "nccl" else backend, *args, **kwargs)


_find_spec, _init_process_group = importlib.util.find_spec, dist.init_process_group
_engine_run_backward = torch.autograd._engine_run_backward


class _Order:
    """A stream or an event where all runs in order. note: called when the host waits for it."""

    note: Callable[[], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.note()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def _follow(self, *others: Any) -> _Order:
        return self

    wait = wait_stream = wait_event = record = record_event = _follow


def _cuda(card: FakeCard) -> dict[str, Any]:
    """What stands in torch.cuda while the card is there."""
    order = type("Order", (_Order,), {"note": lambda _: card.note("synchronize", "synchronize")})
    stream = order()
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": CARD.index,
        "get_device_name": "fake card",
        "get_device_capability": (9, 0),
        "current_stream": stream,
        "default_stream": stream,
        "stream": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
        **dict.fromkeys(("set_device", "empty_cache", "_lazy_init")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
    }
    return {name: _answering(value) for name, value in answers.items()} | {
        "Stream": order,
        "Event": order,
        "synchronize": lambda *_: card.note("synchronize", "torch.cuda.synchronize"),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def lines_as_rows(lines: Counter[Line]) -> Sequence[dict[str, Any]]:
    """For JSON, in order of place."""
    ordered = sorted(lines.items(), key=lambda item: (item[0].place, item[0]))
    return [
        {"kind": line.kind, "what": line.what, "place": line.place, "count": count}
        for line, count in ordered
    ]
