"""A machine with GPUs, as far as the driver's count goes, and what a started process sees."""

import sys

import pytest

from megatron_opd.launch import gpus

# Prints what CUDA would read, and stays until as many of its siblings' logs hold that.
SEES = """
import glob, os, time
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS")
print("sees", *(os.environ.get(name) for name in names), flush=True)
logs = os.path.join(os.path.dirname(os.readlink("/proc/self/fd/1")), "*.log")
def has_seen(log):
    try:
        return "sees" in open(log).read()
    except FileNotFoundError:  # somebody else's, in a folder that all share
        return False
while sum(map(has_seen, glob.glob(logs))) < int(os.environ["SIBLINGS"]):
    time.sleep(0.05)
"""
SEER = [sys.executable, "-c", SEES]


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """From here on the driver reports `count` GPUs; visible: the user's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(gpus, "driver_count", lambda: count)
    monkeypatch.setattr(gpus, "torch_is_for_cpus", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
