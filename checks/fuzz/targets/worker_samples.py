"""Messages of data workers to a learner's rank -> the batch that it trains on."""

from __future__ import annotations

from random import Random

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes
from checks.fuzz.targets.learner_requests import (
    NUM_EXPERTS,
    VOCAB_SIZE,
    damaged_head,
    sample,
)
from checks.fuzz.targets.learner_requests import oracle as batch_fault
from megatron_opd.batching.advantages import no_groups
from megatron_opd.batching.checks import check_batch
from megatron_opd.batching.shares import SampleSequence, Share
from megatron_opd.data_workers.data_client import CannotFetch, Frames, asked_key, by_address
from megatron_opd.records.columns import RankBatch
from megatron_opd.records.types import HeldRollout, HeldSample, Sample
from megatron_opd.transport import messages as m
from megatron_opd.transport.frames import (
    check_sizes,
    from_frames,
    sizes_of,
    to_frames,
    with_samples,
)
from megatron_opd.transport.samples import FRAMES, decode_inputs, frames_of

WORKERS = ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
Message = tuple[str, list[bytes]]
"""Who gives it, and its frames: a key, then a sample's."""
Given = tuple[m.Train, list[bytes], list[Message]]
"""The controller's request and frames, and what workers give."""


class Missing(ValueError):
    """The rank reports that samples are not to be had."""


def call(given: Given) -> tuple[m.Train, RankBatch]:
    """As the head of a model copy reads a share of which workers hold a part."""
    request, own, messages = given
    wanted = {address: set(keys) for address, keys in by_address(request.parts).items()}
    found: dict[str, Frames] = {}
    try:
        for address, (name, *given_frames) in messages:
            columns = [memoryview(frame) for frame in given_frames]
            found[asked_key(address, wanted.get(address, set()), name, columns)] = columns
    except CannotFetch as error:
        raise Missing(str(error)) from None
    if any(wanted.values()):
        raise Missing("samples that were not given")
    frames = with_samples([memoryview(frame) for frame in own], request.parts, found)
    batch = from_frames(request.update, request.version, request.plan, frames)
    check_batch(batch, vocab_size=VOCAB_SIZE, num_experts=NUM_EXPERTS, sampled=True)
    check_sizes(batch, request.sizes)
    return request, batch


def oracle(given: Given, found: tuple[m.Train, RankBatch]) -> str | None:
    """The batch has the samples of the share, in its order and of the sizes that were told."""
    request, _, messages = given
    _, batch = found
    fault = batch_fault([m.encode(request)], (request, batch))
    if fault is not None:
        return fault
    asked = sorted(part[:2] for part in request.parts if part[0])
    if sorted((address, _text(frames[0])) for address, frames in messages) != asked:
        return "samples that were not asked for, of another worker, or twice"
    heads = {_text(frames[0]): frames[1] for _, frames in messages}
    lengths, responses = batch.length_B.tolist(), batch.response_B.tolist()
    at = token = start = 0
    for number, (address, key, _) in enumerate(request.parts):
        length, response = lengths[number], responses[number]
        cached = sum(batch.count_T[token : token + response].tolist())
        if request.sizes[number] != (length, response, cached):
            return "a sample of another size than the controller was told"
        if address:
            plain = _plain(heads[key])
            sent = decode_inputs(number, [heads[key], *[b""] * (FRAMES - 1)]) if plain else None
            ids = batch.ids_S[at : at + length].tolist()
            if sent is not None and ids != sent.ids_S.tolist():
                return "a sample in the place of another"
        at, token, start = at + length, token + response, start + cached
    return None


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _plain(head: bytes) -> bool:
    """Whether the sample has no routing, so that its first frame says it all."""
    return b"experts" not in head


def held(whole: Sample, address: str) -> HeldSample:
    """What the controller knows of a sample that a worker holds."""
    rollout = whole.rollout
    found = HeldRollout(
        prompt=rollout.prompt,
        worker=address,
        key=f"k-{rollout.prompt.uid}",
        sizes=rollout.sizes,
        cache=whole.cache,
        geometric_logps=rollout.geometric_logps,
        spans=rollout.spans,
        finish_reason=rollout.finish_reason,
        started_s=0.0,
        finished_s=1.0,
    )
    return HeldSample(found, whole.scores(VOCAB_SIZE))


def make(rng: Random) -> Given:
    """A share of two to four samples, most of them elsewhere, and hostile messages of workers."""
    count, routed = rng.randint(2, 4), rng.random() < 0.3
    wholes = [sample(rng, uid, routed, weighed=True) for uid in range(count)]
    places = [rng.choice((*WORKERS, *WORKERS, "")) for _ in wholes]
    placed = zip(wholes, places, strict=True)
    samples = tuple(held(whole, place) if place else whole for whole, place in placed)
    sequences = tuple(map(SampleSequence, samples))
    share = Share(3, 4, [[list(range(count))]], sequences, no_groups(count))
    parts = [(place, f"k-{uid}" if place else "", 0) for uid, place in enumerate(places)]
    request = m.Train(1, 3, 4, share.plan, parts, sizes_of(share))
    own = [bytes(frame) for frame in to_frames(share)]
    messages: list[Message] = [
        (place, [key.encode(), *map(bytes, frames_of(whole))])
        for (place, key, _), whole in zip(parts, wholes, strict=True)
        if place
    ]
    rng.shuffle(messages)
    if messages and rng.random() < 0.95:
        for _ in range(rng.randint(1, 2)):
            _damage(rng, messages)
    return request, own, messages


def _damage(rng: Random, messages: list[Message]) -> None:
    """Change one message of those that are there, or their number."""
    at, other = rng.randrange(len(messages)), rng.randrange(len(messages))
    place, frames = messages[at]
    frames = list(frames)
    edits = ("head", "head", "head", "bytes", "key", "who", "twice", "swap", "frames", "other")
    edit = rng.choice(edits)
    number = rng.randrange(len(frames))
    if edit == "head" and len(frames) > 1 and frames[1]:
        try:
            frames[1] = damaged_head(rng, frames[1])
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            frames[1] = b""  # it was damaged before
    elif edit == "bytes":
        frames[number] = damaged_bytes([frames[number]], most=2)(rng)
    elif edit == "key":
        frames[0] = rng.choice((messages[other][1][0], b"k-9", b"", b"\xff", b"k-0"))
    elif edit == "who":
        place = rng.choice(WORKERS)
    elif edit == "twice":
        messages.insert(other, (place, list(frames)))
    elif edit == "swap":
        _, others = messages[other]
        others = list(others)
        a, b = rng.randrange(1, 1 + FRAMES), rng.randrange(1, 1 + FRAMES)
        if a < len(frames) and b < len(others):
            frames[a], others[b] = others[b], frames[a]
            messages[other] = (messages[other][0], others)
    elif edit == "other":
        frames[1:] = map(bytes, frames_of(sample(rng, 9, routed=False, weighed=True)))
    elif rng.random() < 0.5:
        del frames[max(1, number) :]
    else:
        frames.insert(1 + rng.randrange(len(frames)), rng.choice((b"", frames[-1])))
    messages[at] = (place, frames)


TARGET = Target("worker_samples", make, call, (ValueError,), oracle, share=2)
