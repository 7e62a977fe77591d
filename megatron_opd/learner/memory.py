"""Moves what only an update needs out of a rank's device memory, and back, bit for bit.

That are the optimizer's float32 parameters and moments, which go to host memory, and the gradient
buffers, whose contents no update takes over from the one before. Weights stay: they are what a
weight sync sends. Megatron's own `offload_to_cpu` of an optimizer goes through pageable memory, and
cuts the tie between parameters that are views of the model's weights (float32 models, the
precision-aware optimizer) and those weights; here such views stay where they are.

Offloaded tensors are ordinary tensors of the host: a checkpoint is written from them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_opd.learner.state.optimizer import parts_of

Key = tuple[int, int, str]
Slot = tuple[Key, torch.Tensor, Callable[[torch.Tensor], None]]


class UpdateMemory:
    """Holds this rank's optimizer state and gradients, on the device or off it.

    Host buffers are pinned on a CUDA machine, and kept for the next time. On a CPU rank only the
    gradients are given up: the rest is in host memory as it is.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        device: torch.device,
    ) -> None:
        self._chunks, self._optimizer, self._device = tuple(chunks), optimizer, device
        self._hosts: dict[Key, torch.Tensor] = {}
        self._offloaded = False

    def offload(self) -> None:
        """Give the memory up; nothing to do if it is given up already. Not during an update."""
        if self._offloaded:
            return
        self._optimizer.zero_grad()  # also copies of gradients in another precision
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        moved: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []
        for key, tensor, put in self._slots():
            if is_on_device(tensor):
                host = self._host(key, tensor)
                host.copy_(tensor, non_blocking=True)
                moved.append((put, host))
        self._synchronize()
        for put, host in moved:
            put(host)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes of this GPU see only what the driver has
        self._offloaded = True

    def onload(self) -> None:
        """Take the memory back, with what was in it; nothing to do if it is here."""
        if not self._offloaded:
            return
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        for key, tensor, put in self._slots():
            host = self._hosts.get(key)
            if host is not None and host.data_ptr() == tensor.data_ptr():
                put(tensor.to(self._device, non_blocking=True, copy=True))
        self._synchronize()
        self._offloaded = False

    def _synchronize(self) -> None:
        """Wait for copies that are under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _host(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host buffer of a slot."""
        host = self._hosts.get(key)
        if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
            host = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda"
            )
            self._hosts[key] = host
        return host

    def _buffers(self) -> Iterator[Any]:
        """Yield Megatron's buffers of parameters and gradients."""
        for chunk in self._chunks:
            whole: Any = chunk
            yield from whole.buffers  # Megatron's, not those of torch modules
            yield from whole.expert_parallel_buffers

    def _slots(self) -> Iterator[Slot]:
        """Yield the optimizer's own tensors, and what puts another tensor in the place of each."""
        weights = {
            parameter.untyped_storage().data_ptr()
            for chunk in self._chunks
            for parameter in chunk.parameters()
        }
        for number, part in enumerate(parts_of(self._optimizer)):
            groups: list[Any] = part.optimizer.param_groups
            held = [parameter for group in groups for parameter in group["params"]]
            for index, parameter in enumerate(held):
                if parameter.untyped_storage().data_ptr() not in weights:
                    yield (number, index, "param"), parameter.data, partial(_put, parameter)
                state: dict[str, Any] = part.optimizer.state.get(parameter, {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and name != "step":
                        yield (number, index, name), value, partial(state.__setitem__, name)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor takes an accelerator's memory."""
    return tensor.device.type != "cpu"


def _put(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    parameter.data = data
