"""Checks that every element of a served model came from its checkpoint.

SGLang's models read what a checkpoint holds and do not look at what it lacks: such a parameter is
memory that nobody wrote. So each is filled with a pattern before SGLang reads the checkpoint, and
what still holds it afterwards was not loaded: a whole tensor, one of those that are fused into a
parameter, an expert of a stack. Whatever wrote an element counts, so this holds for every model.
Parameters that quantisation may leave as they were made (a scale of 1) are put back.

Nor does SGLang look at what a checkpoint holds besides: a bias that its model lacks, a layer too
many. Such a tensor of the language model's own makes it another one, and is refused.

Buffers are computed from the configuration and not looked at.
"""

from __future__ import annotations

import bisect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_bridge.config_file import config_of
from sglang_bridge.errors import one_line, some
from sglang_bridge.language_models import OTHER_PARTS, is_published, renamed
from sglang_bridge.server import pieces
from sglang_bridge.server.compat import gemma, gpt_oss, ranks, sinks
from sglang_bridge.server.plain_weights import format_to_undo
from sglang_bridge.server.spec import MODEL_KEY_VARIABLE, REFUSED
from sglang_bridge.weights.dequantise import dequantised

logger = logging.getLogger(__name__)

PATTERNS = {1: 0x7F, 2: 0x7FE5, 4: 0x7FE5A5A5, 8: 0x7FFDA5A5A5A5A5A5}
"""What each element holds at first, by its bytes: of floats, a NaN that no arithmetic makes."""
OF_TYPE = {
    # no symmetric quantisation gives a whole row of it, as it gives 127 for a row of one number
    torch.int8: -128,
    # as a scale 2**38, where 127, a scale of 1, may fill a column
    torch.uint8: -91,
    # the only NaN of these
    torch.float8_e8m0fnu: -1,
    torch.float8_e4m3fnuz: -128,
    torch.float8_e5m2fnuz: -128,
}
"""What else it is for types where that pattern is an ordinary number."""
AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 1 << 26
"""Elements that are compared at once, with a byte of memory for each."""
MAY_STAY = ("scale", "zero", "offset", "amax")
"""Parts of names of parameters that quantised checkpoints may leave out: a constant stands in."""
MODEL_PREFIXES, HEAD = ("model.", "lm_head."), "lm_head.weight"
"""Starts of the names of a language model's own tensors, and the one that may be tied."""
HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of names of tensors that follow from config.json, and that no model reads."""

_is_draft = False  # whether SGLang loads the model that drafts for another


class Incomplete(RuntimeError):
    """Reports that a checkpoint lacks what its model has, or cannot be read."""


def around_load_model(original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Keeps whether the model that is loaded now only drafts for another; mends what it reads."""
    global _is_draft
    _is_draft = bool(kwargs["model_config"].is_draft_model)
    gpt_oss.use_dtype(kwargs["model_config"])
    try:
        model = original(loader, *args, **kwargs)
    finally:
        _is_draft = False
    gemma.round_scales(model)
    gpt_oss.take_single_experts(model)
    return model


def around_load_weights(
    original: Callable[..., None], model: Any, weights: Iterable[Any], *args: Any, **kwargs: Any
) -> None:
    """Loads a model for the first time and raises Incomplete, on every rank, if it is another.

    A model that drafts takes some parameters from the one it drafts for, and cannot change what is
    sampled.
    """
    if not _is_draft and is_published(config_of(Path(ranks.model_path()))):
        weights = renamed(weights)
    if _is_draft or hasattr(model, "_bridge_loaded"):  # a weight sync from disk
        original(model, weights, *args, **kwargs)
        return
    model._bridge_loaded = True
    undone = format_to_undo(Path(ranks.model_path()), cuda=torch.cuda.is_available())
    if undone is not None:
        weights = dequantised(weights, undone)
    if not torch.cuda.is_available():
        sinks.keep_exact(model)
    defaults = poison(model)
    reads = Reads()
    failed: list[str] = []
    try:
        with reads, reads.in_threads():
            own = gpt_oss.own_experts(model, reads.watched(weights))
            original(model, own, *args, **kwargs)
    except Exception as error:
        logger.exception("the checkpoint cannot be loaded")
        failed = [one_line(f"{type(error).__name__}: {error}", 200)]
    lacking = [] if failed else missing(model, defaults)
    found = ranks.gather_from_ranks((failed, lacking, sorted(reads.unread)))
    errors = [text for each in found for text in each[0]]
    names = sorted({name for each in found for name in each[1]})
    if errors:
        refuse(f"cannot be loaded as config.json describes it: {errors[0]}")
    if names:
        refuse(f"lacks {some(names)}, which a model of its config.json has")
    unread = tuple(sorted(set.intersection(*(set(each[2]) for each in found))))
    if not unread:
        return
    if foreign := [name for name in unread if _is_foreign(name, model)]:
        refuse(
            f"holds {some(foreign)}, which nothing reads: SGLang's {type(model).__name__} is not "
            "what config.json or the checkpoint describes"
        )
    logger.warning("the model leaves unread %s", some(unread))


def _is_foreign(name: str, model: Any) -> bool:
    """Return whether a tensor that was left unread makes the checkpoint another model.

    Not so: heads of other tasks, a tied head, layers that predict further tokens, towers of other
    media, and what a quantised checkpoint may hold besides.
    """
    config, parts = model.config, name.split(".")
    if not name.startswith(MODEL_PREFIXES) or getattr(model, "quant_config", None) is not None:
        return False
    if name == HEAD and getattr(config, "tie_word_embeddings", False):
        return False
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    last = getattr(config, "num_hidden_layers", 0) + further
    numbers = [int(part) for part in parts if part.isdecimal()]
    predicts = bool(numbers) and last - further <= numbers[0] < last
    return not (predicts or OTHER_PARTS.intersection(parts))


def refuse(what: str) -> None:
    """Writes one line for whoever started this server and raises Incomplete. what: see there."""
    key = os.environ.get(MODEL_KEY_VARIABLE, "--model-path")
    if ranks.tp_rank() == 0:
        sys.stderr.write(f"{REFUSED}{key}: {ranks.model_path()} {what}\n")
        sys.stderr.flush()
    raise Incomplete(what)


# ---------------------------------------------------------------- what was not written


def poison(model: torch.nn.Module) -> dict[str, float]:
    """Fills every parameter with its type's pattern; returns {name: constant} of what may stay."""
    defaults: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        held = _held(parameter)
        if held is None:
            continue
        if any(part in name.rpartition(".")[2] for part in MAY_STAY):
            constant = _constant(parameter.data)
            if constant is not None:
                defaults[name] = constant
        held.fill_(_pattern(parameter))
    return defaults


def missing(model: torch.nn.Module, defaults: dict[str, float]) -> list[str]:
    """Returns what no element of was written, or not every one, by the checkpoint's names.

    Parameters in `defaults` that are whole as they were left get their constant back.
    """
    modules = dict(model.named_modules())
    found: list[str] = []
    for name, parameter in model.named_parameters():
        held = _held(parameter)
        if held is None or not is_poisoned(held, _pattern(parameter), _is_exact(parameter)):
            continue
        if name in defaults and bool((held == _pattern(parameter)).all()):
            parameter.data.fill_(defaults[name])
            continue
        owner, _, leaf = name.rpartition(".")
        found += _parts(modules, owner, leaf, parameter) or [name]
    return found


def is_poisoned(held: torch.Tensor, pattern: int, exact: bool) -> bool:
    """Returns whether elements hold the pattern.

    exact: one is enough. Else, of packed integers, which may be the pattern by chance, it takes a
    whole row or column.
    """
    if exact:
        flat = held.reshape(-1) if held.is_contiguous() else held.contiguous().view(-1)
        return any(bool((block == pattern).any()) for block in flat.split(BLOCK))
    if held.ndim < 2:
        return held.numel() > 1 and bool((held == pattern).all())
    each = held.reshape(-1, *held.shape[-2:])
    for matrix in each:
        same = matrix == pattern
        if bool(same.all(0).any()) or bool(same.all(1).any()):
            return True
    return False


def _pattern(parameter: torch.Tensor) -> int:
    return OF_TYPE.get(parameter.dtype, PATTERNS[parameter.element_size()])


def _is_exact(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point()


def _held(parameter: Any) -> torch.Tensor | None:
    """Return a parameter's memory as integers; None: it has none yet, or no known size."""
    if is_lazy(parameter) or parameter.is_meta:
        return None
    kind = AS_INTEGERS.get(parameter.element_size())
    if kind is None or parameter.numel() == 0 or parameter.dtype in (torch.bool, torch.complex64):
        return None
    data = parameter.data
    return data.view(kind) if data.dtype != kind else data


def _constant(data: torch.Tensor) -> float | None:
    """Return the one number that all elements are; None: they differ, or it is 0 or none.

    Memory that was never written is often 0, and no scale is.
    """
    first = float(data.reshape(-1)[0])
    if not isfinite(first) or first == 0:
        return None
    return first if bool((data.float() == first).all()) else None


def _parts(modules: Any, owner: str, leaf: str, parameter: torch.Tensor) -> list[str]:
    """Return the checkpoint's names of what is poisoned in a parameter; none: it is not known."""
    try:
        every = list(pieces.pieces_of(modules, owner, leaf, parameter.data))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return []  # of a layer that weight syncs do not know: the parameter is named as a whole
    pattern, exact = _pattern(parameter), _is_exact(parameter)
    views = ((piece.hf_name, _held(piece.view)) for piece in every)
    return [name for name, held in views if held is not None and is_poisoned(held, pattern, exact)]


# ---------------------------------------------------------------- what was not read


class Reads(TorchDispatchMode):
    """Records which of a checkpoint's tensors were read by an operation that is more than a view.

    unread: names of those that nothing read, without the harmless ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unread: set[str] = set()
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def in_threads(self) -> Iterator[None]:
        """Lets what threads of a loader read count too: a mode holds for its own thread alone."""
        submit = ThreadPoolExecutor.submit

        def submit_watched(pool: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def watched() -> Any:
                with _OfThread(self):
                    return call(*args, **kwargs)

            return submit(pool, watched)

        ThreadPoolExecutor.submit = submit_watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]

    def watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        """Yields the checkpoint's tensors as they come."""
        for name, tensor in weights:
            if not name.endswith(HARMLESS) and tensor.numel() and not _is_zero_bias(name, tensor):
                self._add(name, tensor)
            yield name, tensor

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        with self._lock:
            if start not in self._ranges:
                bisect.insort(self._starts, start)
            # one that was there before has been freed
            self._ranges[start] = (start + tensor.numel() * tensor.element_size(), name)
            self.unread.add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes what it reads."""
        self.note(func, args)
        return func(*args, **(kwargs or {}))

    def note(self, func: Any, args: Any) -> None:
        """Note what an operation is about to read."""
        if not self.unread or func.is_view:
            return
        for value in args:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._read(tensor)

    def _read(self, tensor: torch.Tensor) -> None:
        try:
            place = tensor.data_ptr()
        except RuntimeError:  # a tensor without memory of its own
            return
        with self._lock:
            index = bisect.bisect_right(self._starts, place) - 1
            if index >= 0:
                end, name = self._ranges[self._starts[index]]
                if place < end:
                    self.unread.discard(name)


class _OfThread(TorchDispatchMode):
    """Notes what one further thread reads."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and notes what it reads."""
        self._reads.note(func, args)
        return func(*args, **(kwargs or {}))


def _is_zero_bias(name: str, tensor: torch.Tensor) -> bool:
    """Return whether it adds nothing: GPTQ's checkpoints have such biases of every layer."""
    return name.endswith(".bias") and not bool(tensor.any())
