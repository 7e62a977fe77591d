"""What tests of both ends of a data worker's sockets share."""

from collections.abc import Iterator

import pytest

from megatron_opd.data_workers import taking as taking_module
from megatron_opd.data_workers.taking import Taking


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Taking]:
    monkeypatch.setattr(taking_module, "FIRST_PAUSE_S", 0.002)
    made = Taking(1 << 20)
    yield made
    made.close()
