"""A server that compiles kernels as it starts is waited for, and says what it compiles."""

from pathlib import Path

import pytest

from sglang_bridge.server import compiling
from sglang_bridge.server.compiling import StartLimit, kernels, progress, say_kernel

FLASHINFER = "flashinfer.jit: Building JIT module sampling; this can take several minutes on first"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "student-0.log"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the limit reads, in seconds; a test turns it on."""
    now = [1000.0]
    monkeypatch.setattr(compiling.time, "monotonic", lambda: now[0])
    return now


def named(log: Path, *names: str) -> None:
    log.write_text("".join(f"{compiling.SAID}{name}\n" for name in names))


def test_the_kernels_that_a_log_names_are_found_once_each(
    log: Path, capsys: pytest.CaptureFixture[str]
):
    for kernel in ("norm", "activation", "norm"):  # of two ranks, one of which waits for the other
        say_kernel(Path(f"/cache/sm90a/{kernel}/build-0"))
    assert kernels(log) == []
    assert progress(log) == ""
    log.write_text(f"Loading weights\n{capsys.readouterr().err}[TP0] {FLASHINFER}\n")
    assert kernels(log) == ["norm", "activation", "sampling"]
    assert progress(log) == " (compiling kernels, which are kept: 3 so far, the last sampling)"


def test_a_start_that_compiles_nothing_has_its_time_and_no_more(log: Path, clock: list[float]):
    limit = StartLimit(600, log)
    clock[0] += 599
    assert not limit.is_over()
    clock[0] += 1
    assert limit.is_over()
    assert limit.said() == "was not ready within 600 s"


def test_the_time_is_counted_anew_after_further_kernels_alone(log: Path, clock: list[float]):
    limit = StartLimit(600, log)
    named(log, "norm")
    clock[0] += 600
    assert not limit.is_over()
    clock[0] += 599
    named(log, "norm", "activation")
    assert not limit.is_over()
    clock[0] += 1
    assert not limit.is_over(), "a further kernel"
    clock[0] += 600
    assert limit.is_over(), "no further kernel"
    assert limit.said() == (
        "was not ready within 600 s, counted anew while it compiled 2 kernels, the last "
        "activation; what is compiled is kept, so its next start is shorter"
    )
