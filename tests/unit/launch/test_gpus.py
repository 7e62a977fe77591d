"""Which GPUs this machine has for a run."""

from importlib import metadata

import pynvml
import pytest

from megatron_opd.launch import gpus
from tests.support.gpus import with_gpus


def test_the_users_list_decides(monkeypatch: pytest.MonkeyPatch):
    with_gpus(monkeypatch, 8)
    assert gpus.gpus_here() == tuple("01234567")
    with_gpus(monkeypatch, 8, "4,5,6,7")
    assert gpus.gpus_here() == tuple("4567")
    assert gpus.has_gpu()
    with_gpus(monkeypatch, 8, "")
    assert not gpus.has_gpu()


@pytest.mark.parametrize(("version", "count"), [("2.13.0+cpu", 0), ("2.14.1", 2), ("2.9+cu13", 2)])
def test_a_torch_without_cuda_uses_no_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str, count: int
):
    monkeypatch.setattr(gpus, "driver_count", lambda: 2)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert len(gpus.gpus_here({})) == count


def test_the_drivers_count_is_read_and_its_absence_is_none(monkeypatch: pytest.MonkeyPatch):
    ended: list[bool] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: ended.append(True))
    assert gpus.driver_count() == 3
    assert ended == [True]

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert gpus.driver_count() == 0
