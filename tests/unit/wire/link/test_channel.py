"""Whatever happens to frames and connections, messages arrive once, whole and in order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opd.wire.link.channel import LinkLimits
from megatron_opd.wire.link.sending import LinkBreach
from megatron_opd.wire.link.wire import BULK, LANES, URGENT, Ack, Ping, State
from tests.support.link_network import LIMITS, Network, damaged

ACTIONS = (
    "queue",
    "send",
    "send",
    "send",
    "deliver",
    "deliver",
    "deliver",
    "deliver",
    "any",
    "lose",
    "repeat",
    "damage",
    "replay",
    "ping",
    "resize",
)
BREAKS = ("break", "break", "half", "restart")


def act(net: Network, action: str, chance: random.Random, *, restarts: bool) -> None:
    side = chance.choice(net.sides())
    line = side.line
    if action == "queue":
        size = chance.choice([0, 1, 5, 30, 100, 400, 3000])
        net.queue(side, chance.choice(LANES), chance.randbytes(size))
    elif action == "send":
        net.send(side)
    elif action == "deliver" and line:
        net.deliver(side)
    elif action == "any" and line:
        net.deliver(side, chance.randrange(len(line)))
    elif action == "lose" and line:
        line.popleft()
    elif action == "repeat" and line:
        line.append(list(chance.choice(line)))
    elif action == "damage" and line:
        line[0] = damaged(line[0], chance)
    elif action == "replay" and net.recorded:
        net.hear(*chance.choice(net.recorded))
    elif action == "ping":
        net.ping(side)
    elif action == "resize":
        side.channel.chunk_bytes = chance.randint(1, LIMITS.chunk_bytes)
    elif action == "break":
        net.connect()
    elif action == "half":
        net.connect(welcome=False)
    elif action == "restart" and restarts:
        net.restart(side)


def complaints(net: Network, *, whole: bool) -> list[str]:
    """What was lost, came twice, or came in another order."""
    found = []
    for side in net.sides():
        for lane in LANES:
            sent, got = net.other(side).sent[lane], side.got[lane]
            if got != (sent if whole else sent[: len(got)]):
                found.append(f"lane {lane}: {len(got)} of {len(sent)}")
    return found


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    restarts=st.booleans(),
    steps=st.integers(1, 600),
    calm=st.integers(3, 200),
)
def test_every_schedule_of_faults_ends_with_each_message_once(
    seed: int, restarts: bool, steps: int, calm: int
):
    """calm: steps between two breaks of the connection, about."""
    chance = random.Random(seed)
    net = Network(chance)
    net.connect()
    for _ in range(steps):
        net.now_s += 0.01
        actions = BREAKS if chance.random() < 1 / calm else ACTIONS
        act(net, chance.choice(actions), chance, restarts=restarts)
        assert complaints(net, whole=False) == []
    net.settle()
    assert complaints(net, whole=True) == []


def two(limits: LinkLimits = LIMITS) -> Network:
    net = Network(random.Random(0), limits)
    net.connect()
    return net


def test_without_resending_messages_are_lost(monkeypatch: pytest.MonkeyPatch):
    """The control of the property: nothing but the answers to losses makes it hold."""
    net = two()
    net.queue(net.client, URGENT, bytes(500))
    while net.send(net.client):
        net.server.line.clear()
    monkeypatch.setattr(type(net.client.channel), "ponged", lambda *_: True)
    monkeypatch.setattr(type(net.client.channel.outward[0]), "resume", lambda *_: 0)
    with pytest.raises(AssertionError, match="does not settle"):
        net.settle(rounds=50)
    assert complaints(net, whole=True) == ["lane 0: 0 of 1"]


def test_a_replayed_chunk_is_counted_and_changes_nothing():
    net = two()
    net.queue(net.client, URGENT, b"once")
    net.send(net.client)
    frames = net.server.line[0]
    net.deliver(net.server)
    net.hear(net.server, frames)
    assert net.server.got[URGENT] == [b"once"]
    assert net.server.channel.tally.refused == {"repeated": 1}


def test_what_was_recorded_on_another_connection_is_refused():
    net = two()
    net.queue(net.client, URGENT, b"once")
    net.send(net.client)
    frames = net.server.line[0]
    net.connect()
    net.hear(net.server, frames)
    assert net.server.got[URGENT] == []
    assert net.server.channel.tally.refused == {"a chunk whose checksum is wrong": 1}
    net.settle()
    assert net.server.got[URGENT] == [b"once"]


def test_a_chunk_that_is_sent_back_to_its_sender_is_refused():
    net = two()
    net.queue(net.client, URGENT, b"once")
    net.send(net.client)
    net.hear(net.client, net.server.line[0])
    assert net.client.got[URGENT] == []
    assert net.client.channel.tally.refused == {"a chunk whose checksum is wrong": 1}


def test_a_damaged_chunk_is_asked_for_again_at_once():
    net = two()
    net.queue(net.client, URGENT, bytes(range(60)))
    net.send(net.client)
    head, payload = net.server.line[0]
    net.server.line[0] = [head, bytes([payload[0] ^ 1]) + payload[1:]]
    net.deliver(net.server)
    net.deliver(net.client)
    assert net.send(net.client)
    while net.server.line:
        net.deliver(net.server)
        net.send(net.client)
    assert net.server.got[URGENT] == [bytes(range(60))]


def test_a_gap_is_asked_for_at_once():
    net = two()
    net.queue(net.client, URGENT, bytes(range(100)))
    net.send(net.client)
    net.send(net.client)
    net.server.line.popleft()
    net.deliver(net.server)
    net.deliver(net.client)
    assert net.client.channel.outward[URGENT].sent == 0
    assert net.client.channel.tally.bytes_again == 128


def test_a_heartbeat_finds_that_the_last_chunk_was_lost():
    net = two()
    net.queue(net.client, URGENT, b"last")
    net.send(net.client)
    net.server.line.clear()
    net.ping(net.client)
    net.deliver(net.server)
    net.deliver(net.client)
    assert net.send(net.client)
    net.deliver(net.server)
    assert net.server.got[URGENT] == [b"last"]


def test_a_heartbeat_that_passes_a_chunk_in_the_making_does_not_take_it_for_lost():
    net = two()
    net.queue(net.client, URGENT, b"late")
    channel = net.client.channel
    draft = channel.draw(0.0)
    net.say(net.client, Ping(channel.ping(0.0, draft)))
    net.deliver(net.server)
    net.deliver(net.client)
    assert channel.tally.bytes_again == 0
    assert channel.draw(0.0) is None


def test_a_break_goes_on_after_the_last_acknowledged_chunk():
    net = two()
    net.queue(net.client, BULK, random.Random(1).randbytes(4000))
    for _ in range(10):
        net.send(net.client)
        net.deliver(net.server)
        net.deliver(net.client)
    done = net.client.channel.outward[BULK].arrived
    assert done == 640
    net.connect()
    assert net.client.channel.outward[BULK].sent == done
    net.settle()
    assert net.client.channel.tally.bytes_again == 0
    assert net.server.channel.tally.bytes_received == 4000


def test_what_was_in_flight_to_a_process_that_is_gone_is_dropped():
    net = two()
    net.queue(net.client, URGENT, b"to the old one")
    net.restart(net.server)
    net.queue(net.client, URGENT, b"to the new one")
    net.settle()
    assert net.server.got[URGENT] == [b"to the new one"]


def test_what_is_queued_before_the_first_greeting_arrives():
    net = Network(random.Random(0))
    net.queue(net.client, URGENT, b"early")
    net.settle()
    assert net.server.got[URGENT] == [b"early"]


def test_an_urgent_message_waits_for_one_chunk_at_most():
    net = two()
    net.queue(net.client, BULK, bytes(4000))
    net.send(net.client)
    net.queue(net.client, URGENT, b"now")
    draft = net.client.channel.draw(0.0)
    assert draft is not None
    assert draft.lane == URGENT


def test_urgent_messages_do_not_starve_the_other_lane():
    net = two()
    net.queue(net.client, BULK, bytes(60))
    for _ in range(40):
        net.queue(net.client, URGENT, bytes(60))
    lanes = []
    while (draft := net.client.channel.draw(0.0)) is not None:
        lanes.append(draft.lane)
        net.put(net.client, [bytes(f) for f in net.client.channel.sealed(draft)])
        while net.server.line:
            net.deliver(net.server)
        while net.client.line:
            net.deliver(net.client)
    assert lanes.index(BULK) == 8


def test_nothing_more_is_sent_than_there_is_room_for():
    net = two(LinkLimits(64, 4096, inbox_bytes=1000))
    for _ in range(100):
        net.queue(net.client, URGENT, bytes(90))
    for _ in range(200):
        net.send(net.client)
        for side in (net.server, net.client):
            while side.line:
                net.deliver(side)
        net.server.channel.inbox_bytes = sum(map(len, net.server.got[URGENT]))
    assert 1000 <= net.server.channel.inbox_bytes <= 1000 + 3 * 90
    assert net.client.channel.waiting_bytes > 0


@pytest.mark.parametrize(("arrived", "settled"), [(10_000, 0), (10_000, 10_000), (0, 10)], ids=str)
def test_an_acknowledgement_of_what_was_never_sent_is_a_breach(arrived: int, settled: int):
    net = two()
    net.queue(net.client, URGENT, bytes(100))
    net.send(net.client)
    with pytest.raises(LinkBreach, match="never sent"):
        net.client.channel.told(State((arrived, 0), (settled, 0), 0, 1 << 20), 0.0)


def test_a_process_that_lost_what_it_had_acknowledged_is_not_spoken_to():
    net = two()
    net.queue(net.client, URGENT, b"kept")
    net.settle()
    report = net.server.channel.report
    with pytest.raises(LinkBreach, match="lost what it had acknowledged"):
        net.client.channel.meet(type(report)(*_with_knows(report, b"")), 99)


def _with_knows(report: object, knows: bytes) -> list[object]:
    names = ("protocol", "process", "knows", "state", "chunk_bytes", "message_bytes")
    return [knows if name == "knows" else getattr(report, name) for name in names]


def test_an_old_acknowledgement_takes_nothing_back():
    net = two()
    old = Ack(net.server.channel.state)
    net.queue(net.client, URGENT, bytes(200))
    net.send(net.client)
    net.deliver(net.server)
    net.deliver(net.client)
    before = net.client.channel.outward[URGENT].arrived
    net.client.channel.told(old.state, 0.0)
    assert net.client.channel.outward[URGENT].arrived == before > 0
