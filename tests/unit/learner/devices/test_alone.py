from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opd.learner.devices import cpu
from megatron_opd.learner.devices.alone import patch_collectives, unless_alone


def group_of(ranks: int) -> Any:
    return SimpleNamespace(size=lambda: ranks)


def called(output: torch.Tensor, source: torch.Tensor, **named: Any) -> bool:
    """Whether the collective itself is reached."""
    calls: list[dict[str, Any]] = []

    def collective(output: Any, source: Any, **named: Any) -> str:
        calls.append(named)
        return "handle"

    returned = unless_alone(collective)(output, source, **named)
    assert returned == ("handle" if calls else None)
    assert calls in ([], [named])
    return bool(calls)


def test_one_rank_that_holds_all_calls_nothing():
    buffer = torch.arange(4.0)
    assert not called(buffer, buffer.view(2, 2), group=group_of(1), async_op=False)
    assert torch.equal(buffer, torch.arange(4.0))


@pytest.mark.parametrize(
    ("output", "ranks", "async_op"),
    [
        pytest.param(slice(0, 4), 2, False, id="two ranks"),
        pytest.param(slice(0, 4), 1, True, id="whose caller waits for a handle"),
        pytest.param(slice(0, 2), 1, False, id="a part of the buffer"),
        pytest.param(slice(4, 8), 1, False, id="from another buffer"),
    ],
)
def test_anything_else_goes_on(output: slice, ranks: int, async_op: bool):
    buffer = torch.arange(8.0)
    named = {"group": group_of(ranks), "async_op": async_op, "op": "sum"}
    assert called(buffer[output], buffer[:4], **named)


def test_megatrons_buffers_call_it_and_patching_again_changes_nothing():
    from megatron.core.distributed import param_and_grad_buffer

    module: Any = param_and_grad_buffer
    patch_collectives()
    first = module.dist_all_gather_func, module.dist_reduce_scatter_func
    assert all(function.__module__ == unless_alone.__module__ for function in first)
    patch_collectives()
    assert (module.dist_all_gather_func, module.dist_reduce_scatter_func) == first


def test_a_learner_on_a_cpu_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        pytest.skip("its tensors are the GPU's")
    asked: list[bool] = []
    monkeypatch.setattr(cpu, "give_back_freed", lambda: asked.append(True))
    cpu.install()
    assert asked == [True]
