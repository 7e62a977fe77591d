"""Forward passes are counted with the seconds until the next one begins."""

from types import SimpleNamespace
from typing import Any

from sglang_bridge.server.meter import PassMeter
from sglang_bridge.work import PassSums


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def batch(kind: str, lengths: list[int]) -> Any:
    mode = SimpleNamespace(is_decode=lambda: kind == "decode", is_extend=lambda: kind == "prefill")
    reqs = [SimpleNamespace(seqlen=length) for length in lengths]
    return SimpleNamespace(forward_mode=mode, reqs=reqs, extend_lens=[n - 1 for n in lengths])


def test_a_pass_lasts_until_the_next_or_until_nothing_follows():
    clock, cpu = Clock(), Clock()
    meter = PassMeter(clock, cpu)
    meter.begin(batch("prefill", [5, 9]))
    clock.now_s, cpu.now_s = 0.5, 0.25
    meter.begin(batch("decode", [6, 10]))
    assert meter.work().decode == PassSums(), "an open pass is not counted"
    clock.now_s, cpu.now_s = 0.75, 0.375
    meter.end()
    clock.now_s = 9.0  # idle
    meter.end()
    meter.begin(batch("other", [1]))
    clock.now_s = 10.0
    meter.begin(batch("decode", [7]))
    clock.now_s, cpu.now_s = 10.5, 0.5
    meter.end()
    work = meter.work()
    assert work.prefill == PassSums().plus(2, 12, 0.5, 0.25)
    assert work.decode == PassSums().plus(2, 16, 0.25, 0.125).plus(1, 7, 0.5, 0.125)
