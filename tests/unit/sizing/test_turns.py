"""What a GPU holds in each phase of a window in which servers and learner take turns."""

from megatron_opd.sizing.learner import StageMemory
from megatron_opd.sizing.parameters import Parameters
from megatron_opd.sizing.servers import ServerMemory
from megatron_opd.sizing.turns import host_bytes, turn_memory

LEARNER = StageMemory(
    stage=0,
    num_layers=1,
    parameters=Parameters(1, 0),
    weights=2,
    gradients=40,
    optimizer=100,
    activations=3000,
    working=10000,
)
SERVER = ServerMemory(weights=7, kv_token_bytes=5, kv_tokens=100_000)


def test_no_phase_holds_what_both_sides_work_with():
    found = {turn.phase: (turn.learner, turn.server) for turn in turn_memory(LEARNER, SERVER)}
    assert found == {
        "servers sample": (2, 500_007),
        "learner trains": (13142, 0),
        "weights are sent": (2, 7),
    }
    assert [turn.total for turn in turn_memory(LEARNER, SERVER)] == [500_009, 13142, 9]
    cached = [turn.phase for turn in turn_memory(LEARNER, SERVER) if turn.has_cache]
    assert cached == ["servers sample"]
    assert host_bytes(LEARNER, SERVER) == 107, "gradients are not kept, nor is the KV cache"
