"""How gathered pieces travel between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_opd.models import gather


@pytest.mark.parametrize("way", [dist.isend, dist.irecv])
def test_a_piece_travels_in_a_batch_and_is_waited_for(monkeypatch: pytest.MonkeyPatch, way: Any):
    """Outside a batch NCCL makes a communicator for every pair of ranks."""
    piece, seen = torch.ones(2), list[Any]()

    class Work:
        def wait(self) -> None:
            seen.append("waited")

    def batch(operations: list[Any]) -> list[Work]:
        seen.extend(operations)
        return [Work()]

    monkeypatch.setattr(gather.dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(gather.dist, "P2POp", lambda *arguments: arguments)
    gather._exchange(way, piece, 3)
    assert seen == [(way, piece, 3), "waited"]
