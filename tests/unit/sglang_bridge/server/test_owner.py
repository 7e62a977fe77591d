"""One run writes a server's weights, or many have it score; claims end with their runs."""

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bridge import wire
from sglang_bridge.claims import LEASE_S, RENEW_S, Claim, ClaimStep, Step
from sglang_bridge.proof import proof
from sglang_bridge.server import owner
from sglang_bridge.server.compat import startup
from sglang_bridge.server.owner import MOST_CLAIMS, Claims


@dataclass
class Clock:
    """Seconds, as they are set."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def claim(run: str, *, writes: bool = True, process: str = "p") -> Claim:
    return Claim(run, process, f"run /runs/{run}", writes)


def test_a_second_run_is_refused_with_the_first_one_s_name():
    clock = Clock()
    claims = Claims(clock)
    assert claims.refusal(claim("a"), "take") is None
    clock.now_s = 4
    told = claims.refusal(claim("b"), "take")
    assert told is not None
    assert told.startswith("run /runs/a writes its weights into this server")
    assert "last heard 4 s ago" in told
    assert claims.refusal(claim("b", writes=False), "take") is not None, "they would change"
    assert claims.refusal(claim("a", writes=False), "take") is None, "its own"
    assert claims.refusal(claim("b"), "end") is None
    assert claims.refusal(claim("b"), "take") is not None, "nobody ends another's"
    assert claims.refusal(claim("a"), "end") is None
    assert claims.refusal(claim("a", writes=False), "end") is None
    assert claims.refusal(claim("b"), "take") is None


def test_many_runs_have_a_server_score_and_none_of_them_writes():
    claims = Claims(Clock())
    for run in ("a", "b", "c"):
        assert claims.refusal(claim(run, writes=False), "take") is None
    told = claims.refusal(claim("d"), "take")
    assert told is not None
    assert "run /runs/a has this server score, so no other run may write" in told


def test_a_claim_lasts_while_it_is_renewed_and_no_longer():
    clock = Clock()
    claims = Claims(clock)
    claims.refusal(claim("a"), "take")
    for _ in range(20):
        clock.now_s += RENEW_S
        assert claims.refusal(claim("a"), "renew") is None
        assert claims.refusal(claim("b"), "take") is not None
    clock.now_s += LEASE_S - 0.1
    assert claims.refusal(claim("b"), "take") is not None
    clock.now_s += 0.1
    assert claims.refusal(claim("b"), "take") is None
    told = claims.refusal(claim("a"), "renew")
    assert told is not None, "it was silent for too long, and its weights are not there any more"
    assert "/runs/b writes" in told


def test_a_resumed_run_keeps_its_claim_and_the_process_before_loses_it():
    claims = Claims(Clock())
    assert claims.refusal(claim("a", process="killed"), "take") is None
    assert claims.refusal(claim("a", process="next"), "take") is None
    assert claims.refusal(claim("a", process="killed"), "end") is None, "but does nothing"
    assert claims.refusal(claim("a", process="next"), "renew") is None
    told = claims.refusal(claim("a", process="killed"), "renew")
    assert told is not None
    assert "goes on with this run" in told


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.booleans(),
            st.sampled_from(["take", "renew", "end"]),
            st.sampled_from([0.0, RENEW_S, LEASE_S / 2, LEASE_S]),
        ),
        max_size=40,
    )
)
def test_whoever_writes_is_alone(steps: list[tuple[str, bool, Step, float]]):
    """Against the plain rule, kept here as what each run was last granted, and until when."""
    clock = Clock()
    claims = Claims(clock)
    until: dict[tuple[str, bool], float] = {}
    for run, writes, step, wait_s in steps:
        clock.now_s += wait_s
        others = [
            kind for (other, kind), end in until.items() if other != run and end > clock.now_s
        ]
        allowed = step == "end" or not (any(others) or (writes and others))
        assert (claims.refusal(claim(run, writes=writes), step) is None) == allowed
        if allowed:
            until[run, writes] = clock.now_s + (0 if step == "end" else LEASE_S)


def test_not_more_runs_than_are_told_apart():
    claims = Claims(Clock())
    for number in range(MOST_CLAIMS):
        assert claims.refusal(claim(str(number), writes=False), "take") is None
    assert "runs use this server already" in str(claims.refusal(claim("x", writes=False), "take"))
    assert claims.refusal(claim("7", writes=False), "renew") is None


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        startup, "add_own_route", lambda path, answer, _: found.update({path: answer})
    )
    monkeypatch.setattr(startup, "is_starting", lambda: False)
    return found


def ask(answer: Any, body: bytes = b"", **query: str) -> tuple[int, str]:
    async def stream() -> Any:
        yield body

    reply = asyncio.run(answer(SimpleNamespace(query_params=query, stream=stream)))
    return reply.status_code, reply.body.decode()


@pytest.mark.parametrize(
    ("nonce", "challenge", "said"),
    [
        ("n", "c", proof("n", "c")),
        (None, "c", ""),
        ("n", "", ""),
        ("n", "c" * 101, ""),
    ],
)
def test_a_server_proves_its_start_and_keeps_its_nonce(
    routes: dict[str, Any], nonce: str | None, challenge: str, said: str
):
    owner.add_owner_routes(nonce)
    assert ask(routes[wire.PROOF_ROUTE], challenge=challenge) == (200, said)
    assert ask(routes[wire.PROOF_ROUTE]) == (200, "")


def test_claims_over_http(routes: dict[str, Any]):
    owner.add_owner_routes(None)
    route = routes[wire.CLAIM_ROUTE]
    taken = msgspec.json.encode(ClaimStep(claim("a"), "take"))
    assert ask(route, taken) == (200, "")
    status, told = ask(route, msgspec.json.encode(ClaimStep(claim("b"), "take")))
    assert (status, told[:11]) == (409, "run /runs/a")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 10_000,
        json.dumps({"claim": {}, "step": "take"}).encode(),
        msgspec.json.encode(ClaimStep(claim("a"), "take")).replace(b"take", b"steal"),
        msgspec.json.encode(ClaimStep(claim("a"), "take")).replace(b"true", b"1"),
    ],
)
def test_what_is_no_claim_is_refused(routes: dict[str, Any], body: bytes):
    owner.add_owner_routes(None)
    assert ask(routes[wire.CLAIM_ROUTE], body)[0] == 400
    assert ask(routes[wire.CLAIM_ROUTE], bytes(20_000))[0] == 413
