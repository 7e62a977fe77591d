"""What tests of both ends of a data worker's sockets share."""

from collections.abc import Iterator

import pytest

from megatron_opd.data_workers import data_client as client_module
from megatron_opd.data_workers.data_client import DataClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataClient]:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.002)
    made = DataClient(1 << 20)
    yield made
    made.close()
