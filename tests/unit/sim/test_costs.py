"""Costs are what their JSON says, and no number out of its range gets in."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_opd.sim.costs import (
    Costs,
    EngineCost,
    LearnerCost,
    LognormalLengths,
    ScoreCost,
    SyncCost,
    decode_costs,
    encode_costs,
    read_costs,
)

COSTS = Costs(
    engine=EngineCost(step_s=0.01, step_request_s=1e-4, cache_tokens=4096),
    teachers={"teacher": ScoreCost(request_s=0.002, token_s=1e-5)},
    learner=LearnerCost(token_s=1e-6, ranks=4),
    sync=SyncCost(sync_s=1.5, paused_s=0.5, num_bytes=7),
    host_cores=2.0,
)


def test_costs_are_what_their_json_says() -> None:
    assert decode_costs(encode_costs(COSTS)) == COSTS


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b'"step_s": 0.01', b'"step_s": -1', "step_s must be a finite number >= 0, got -1"),
        (b'"sync_s": 1.5', b'"sync_s": 1e308', r"sync_s must be <= 1e\+09 seconds, got 1e\+308"),
        (b'"host_cores": 2.0', b'"host_cores": 1e-300', "host_cores must be >= 0.01, got 1e-300"),
        (b'"step_s": 0.01', b'"step_s": "0.01"', "step_s"),
        (b'"step_s": 0.01,', b"", "step_s"),
        (b'"ranks": 4', b'"ranks": 0', "ranks"),
        (b'"paused_s": 0.5', b'"paused_s": 2', "paused_s must be <= sync_s = 1.5"),
        (b'"host_cores": 2.0', b'"host_cores": 0', "host_cores"),
        (b'"network_s"', b'"delay_s"', "delay_s"),
        (b'"network_s": 0.0', b'"network_s": 1e999', "network_s"),
        (b"{", b"[", "Expected|malformed"),
        (b'"network_s"', b'"\xff"', "utf-8"),
        (b'"network_s"', b'"\\u001b[2J"', "unknown field"),
    ],
)
def test_a_mistake_in_a_file_is_named(
    tmp_path: Path, before: bytes, after: bytes, said: str
) -> None:
    content = encode_costs(COSTS)
    assert before in content
    path = tmp_path / "costs.json"
    path.write_bytes(content.replace(before, after, 1))
    with pytest.raises(ValueError, match=said) as raised:
        read_costs(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).isprintable()


def test_a_step_may_cost_what_its_requests_cost_alone() -> None:
    """A fit to requests that are always as many may find this."""
    found = replace(COSTS, engine=EngineCost(step_s=0.0, step_request_s=1e-4))
    assert decode_costs(encode_costs(found)) == found


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"costs\.json: No such file"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineCost(step_s=float("nan")),
        lambda: EngineCost(step_s=1.0, max_running=0),
        lambda: EngineCost(step_s=1e-300),
        lambda: EngineCost(step_s=0.0),
        lambda: ScoreCost(token_s=-1.0),
        lambda: SyncCost(sync_s=1.0, paused_s=0.5, held_s=1.5),
        lambda: LognormalLengths(mean=0.0),
    ],
)
def test_no_number_out_of_its_range_gets_in(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"must be"):
        make()
