"""Finds once for a group which of its ranks on one host exchange weights through lanes.

All ranks say in which process namespace of which running kernel they are, and as which user; then
every sender offers its memory, and every receiver on its host opens it and compares what lies
there; then all learn who could. So both ends of a pair agree, whatever the reason why one of them
cannot, and nothing has to be agreed upon while weights are sent.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from sglang_bridge.weights.device_lane import KIND as ON_DEVICE
from sglang_bridge.weights.device_lane import DeviceLane, DeviceOpener
from sglang_bridge.weights.exchange import PeerLost, said_plainly
from sglang_bridge.weights.host_lane import HostLane, HostOpener
from sglang_bridge.weights.lanes import (
    DESCRIPTOR_BYTES,
    BadDescriptor,
    Lane,
    Lanes,
    Opener,
    use_lanes,
)

logger = logging.getLogger(__name__)

PROOF_BYTES = 16
"""Random bytes at the start of the memory that is offered, and beside its descriptor."""
BOOT_ID, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"


def find_lanes(
    group: ProcessGroup, device: torch.device, *, sends: bool = False, receives: bool = False
) -> Lanes:
    """Find the lanes between the ranks of a gloo group, and use them. Collective.

    device: where this rank's weights are. sends, receives: what it does in the group.
    PeerLost: a rank did not take part.
    """
    try:
        lanes = _found_lanes(group, device, sends=sends, receives=receives)
    except RuntimeError as error:
        cause = f"the ranks did not agree on how to send on one host: {said_plainly(error)}"
        raise PeerLost(0, cause) from None
    use_lanes(group, lanes)
    return lanes


def _found_lanes(
    group: ProcessGroup, device: torch.device, *, sends: bool, receives: bool
) -> Lanes:
    rank, mine = group.rank(), _host()
    there = [at for at, host in enumerate(_all_gather(group, mine)) if host == mine and at != rank]
    lane = _lane(device) if sends and there else None
    offers = _all_gather(group, _offer(lane))
    openers: dict[int, Opener] = {}
    for peer in there if receives else ():
        opener = _opened(peer, offers[peer], device)
        if opener is not None:
            openers[peer] = opener
    taken = _all_gather(group, bytes(peer in openers for peer in range(group.size())))
    if lane is None:
        return Lanes(openers=openers)
    lane.hide()
    takers = frozenset(peer for peer, opened in enumerate(taken) if opened[rank])
    if takers:
        logger.info("weights to ranks %s of the group stay on this host", sorted(takers))
    return Lanes(lane, takers, openers)


def _all_gather(group: ProcessGroup, mine: bytes) -> list[bytes]:
    """Return what every rank says, as many bytes each."""
    said = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    found = [torch.empty_like(said) for _ in range(group.size())]
    group.allgather([found], [said]).wait()
    return [each.numpy().tobytes() for each in found]


def _host() -> bytes:
    """Return 32 bytes that name the running kernel, the process namespace and the user.

    Where they cannot be told nobody else says the same.
    """
    try:
        parts = (BOOT_ID.read_text(encoding="ascii"), os.readlink(PROCESSES), str(os.geteuid()))
    except OSError:
        return os.urandom(hashlib.sha256().digest_size)
    return hashlib.sha256("\n".join(parts).encode()).digest()


def _lane(device: torch.device) -> Lane | None:
    """Return memory to send from; None, which is logged: there is none that others can open."""
    try:
        return DeviceLane(device) if device.type == "cuda" else HostLane()
    except Exception as error:  # noqa: BLE001  whatever it is, the group carries weights too
        said = said_plainly(error)
        logger.warning("no memory to share on this host, weights go through the group: %s", said)
        return None


def _offer(lane: Lane | None) -> bytes:
    """Return the descriptor of a lane's first bytes, and these; zeros: there is no lane."""
    if lane is None:
        return bytes(DESCRIPTOR_BYTES + PROOF_BYTES)
    proof = os.urandom(PROOF_BYTES)
    first = lane.memory[:PROOF_BYTES]
    first.copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
    return lane.export(first) + proof


def _opened(peer: int, offer: bytes, device: torch.device) -> Opener | None:
    """Return what opens the memory of `peer`; None: it offers none, or, logged, it did not open."""
    descriptor, proof = offer[:DESCRIPTOR_BYTES], offer[DESCRIPTOR_BYTES:]
    if not any(descriptor):
        return None
    try:
        on_device = descriptor[:1] == ON_DEVICE
        opener = DeviceOpener(device) if on_device else HostOpener(descriptor)
        if opener.nbytes(descriptor) != PROOF_BYTES:
            raise BadDescriptor(f"an offer of other than {PROOF_BYTES} bytes")
        found = torch.empty(PROOF_BYTES, dtype=torch.uint8, device=device)
        opener.copy(descriptor, 0, found, torch.uint8)
        opener.taken()
        if found.cpu().numpy().tobytes() != proof:
            raise BadDescriptor("other memory than was offered")
    except Exception as error:  # noqa: BLE001  whatever it is, the group carries weights too
        logger.warning(
            "the memory of rank %d on this host did not open, "
            "its weights come through the group: %s",
            peer,
            said_plainly(error),
        )
        return None
    return opener
