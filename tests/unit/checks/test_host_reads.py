"""The fake card finds what a real one would make the host wait for, and where; no value differs."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_opd.losses.host import sent
from tests.support.fake_card import CARD, CPU, FakeCard, Kind, on_card

Ask = Callable[[torch.Tensor], object]

READS: dict[str, tuple[str, Ask]] = {
    "item": ("_local_scalar_dense", lambda x: x.sum().item()),
    "float": ("_local_scalar_dense", lambda x: float(x[0])),
    "bool": ("_local_scalar_dense", lambda x: bool((x > 0).any())),
    "index of a list": ("_local_scalar_dense", lambda x: [7, 8, 9, 10][x.long()[1]]),
    "tolist": ("_to_copy", lambda x: x.tolist()),
    "cpu": ("_to_copy", lambda x: x.cpu()),
    "to": ("_to_copy", lambda x: x.to("cpu")),
    "copy_": ("copy_", lambda x: torch.empty(3).copy_(x)),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "mask": ("index.Tensor", lambda x: x[x > 0]),
    "assigned mask": ("index_put_", lambda x: (x + 1).__setitem__(x > 0, x[0])),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "unique": ("_unique2", lambda x: x.unique()),
    "unique_consecutive": ("unique_consecutive", lambda x: x.unique_consecutive()),
    "repeat_interleave": ("repeat_interleave.Tensor", lambda x: x.repeat_interleave(x.long())),
    "bincount": ("bincount", lambda x: torch.bincount(x.long())),
    "equal": ("equal", lambda x: torch.equal(x, x + 1)),
}
COPIES: dict[str, tuple[str, Ask]] = {
    "tensor": ("_to_copy", lambda x: torch.tensor([1.0], device=CARD)),
    "as_tensor": ("_to_copy", lambda x: torch.as_tensor([1.0], device="cuda")),
    "new_tensor": ("_to_copy", lambda x: x.new_tensor(2.0)),
    "cuda": ("_to_copy", lambda x: torch.ones(2).cuda()),
    "to": ("_to_copy", lambda x: torch.ones(2).pin_memory().to(x.device)),
    "list of places": ("_to_copy", lambda x: x[[0, 2]]),
    "number at a place": ("copy_", lambda x: x.__setitem__(0, 2.0)),
    "number at places": ("index_put_", lambda x: x.__setitem__(x.long().clamp(max=2), 2.0)),
}
SYNCHRONISES: dict[str, Ask] = {
    "device": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.Stream().record_event().synchronize(),
}
UNPINNED: dict[str, Ask] = {
    "there": lambda x: torch.ones(2).to(CARD, non_blocking=True),
    "back": lambda x: torch.empty(3).copy_(x, non_blocking=True),
}
MIXED: dict[str, tuple[str, Ask]] = {
    "sum": ("add.Tensor", lambda x: x + torch.ones(3)),
    "index": ("index.Tensor", lambda x: x[torch.tensor([0, 1])]),
    "joined": ("cat", lambda x: torch.cat([x, torch.ones(3)])),
}
PLANTED: dict[str, tuple[Kind, str | None, Ask]] = {
    **{f"read: {name}": ("read", what, ask) for name, (what, ask) in READS.items()},
    **{f"copy: {name}": ("copy", what, ask) for name, (what, ask) in COPIES.items()},
    **{f"synchronize: {name}": ("synchronize", None, ask) for name, ask in SYNCHRONISES.items()},
    **{f"unpinned: {name}": ("unpinned", None, ask) for name, ask in UNPINNED.items()},
    **{f"mixed: {name}": ("mixed", what, ask) for name, (what, ask) in MIXED.items()},
}


def numbers() -> torch.Tensor:
    return on_card(torch.tensor([3.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", PLANTED)
def test_each_kind_is_found_with_its_place(name: str):
    kind, what, ask = PLANTED[name]
    x = numbers()
    with FakeCard() as card:
        ask(x)
    (line,) = card.lines
    assert line.kind == kind
    assert what in (line.what, None)
    file, number = inspect.getsourcefile(ask), inspect.getsourcelines(ask)[1]
    assert file is not None
    assert file.endswith(line.place.partition(":")[0])
    assert line.place.startswith(f"tests/unit/checks/test_host_reads.py:{number} (")
    assert card.lines[line] == (2 if what == "bincount" else 1)
    assert bool(card.waits) == (kind not in ("unpinned", "mixed"))


def test_what_waits_for_nothing_yields_nothing():
    x = numbers()
    with FakeCard() as card:
        host = torch.empty(3, pin_memory=True)
        host.copy_(x, non_blocking=True)
        back = x.to("cpu", non_blocking=True)
        index = sent(np.array([2, 0]), CARD)
        y = torch.zeros(3, device="cuda") + x[index].sum()
        y.index_fill_(0, index, 1.0)
        y[y > 5] = 1.0
        y[:2] = 1.0
        y[:2].repeat_interleave(index, output_size=2)
        torch.where(x > 1, x, 0.0).cumsum(0).max()
        assert torch.as_tensor(x, device=CARD) is x
        assert (y + torch.tensor(2.0)).device == CARD
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert not card.lines, card.lines
    assert back.tolist() == host.tolist() == [3.0, 0.0, 1.0]


def test_it_is_a_card_as_far_as_python_can_see():
    with FakeCard():
        x = torch.nn.Parameter(torch.empty(2, 3, device=torch.cuda.current_device()))
        layer = torch.nn.Linear(2, 2, device="cuda")
        assert torch.cuda.is_available()
        assert isinstance(x, torch.nn.Parameter)
        assert (x.device, x.is_cuda, x.device.type) == (CARD, True, "cuda")
        assert x.type() == "torch.cuda.FloatTensor"
        assert layer.weight.device == x.cuda().device == torch.ones(1).to("cuda").device == CARD
        assert x.cpu().device == x.to("cpu").device == CPU
    assert not torch.cuda.is_available()


def test_gradients_and_optimizer_steps_are_those_of_a_cpu():
    """Views, `data`, steps in place, and what autograd calls in Python."""

    def trained(device: torch.device) -> list[list[float]]:
        torch.manual_seed(0)
        flat = torch.randn(12).to(device)
        weight = torch.nn.Parameter(torch.empty(3, 4, device=device))
        weight.data = flat.view(3, 4)
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        x = torch.randn(5, 4).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            _Scaled.apply(x @ weight.t()).square().mean().backward()
            optimizer.step()
        return flat.view(3, 4).tolist()

    plain = trained(CPU)
    with FakeCard():
        assert trained(CARD) == plain


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return grad * torch.full((), 2.0, device="cuda" if grad.is_cuda else "cpu")


def test_a_read_of_the_backward_pass_names_its_node():
    x = numbers().requires_grad_()
    with FakeCard() as card:
        masked = x[torch.ones(3, dtype=torch.bool, device=CARD)]
        card.lines.clear()
        masked.sum().backward()
    assert [line.kind for line in card.lines] == ["read"]
    assert "in the backward pass of IndexBackward0" in next(iter(card.lines)).place
