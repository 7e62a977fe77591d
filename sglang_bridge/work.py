"""Defines what a server tells of its own speed: sums over its forward passes. Frozen, torch-free.

The sums are all that least squares needs to find what a pass costs, so that the seconds of every
single pass count although a few numbers travel.
"""

from __future__ import annotations

import msgspec

TERMS = 3


class PassSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over passes of one kind, with x = (1, requests, tokens) of a pass.

    gram: [9], row by row, of x x^T, so that gram[0] is the number of passes. busy, cpu: [3], of x
    times the pass's seconds of the clock, and its seconds of CPU in the scheduler's process.
    busy_squares, cpu_squares: of those seconds squared.
    """

    gram: tuple[float, ...] = (0.0,) * TERMS**2
    busy: tuple[float, ...] = (0.0,) * TERMS
    cpu: tuple[float, ...] = (0.0,) * TERMS
    busy_squares: float = 0.0
    cpu_squares: float = 0.0

    def __post_init__(self) -> None:
        if len(self.gram) != TERMS**2 or len(self.busy) != TERMS or len(self.cpu) != TERMS:
            raise ValueError(f"sums of {TERMS} terms are needed")

    def plus(self, requests: float, tokens: float, busy_s: float, cpu_s: float) -> PassSums:
        """Returns the sums with one more pass."""
        x = (1.0, float(requests), float(tokens))
        one = PassSums(
            tuple(a * b for a in x for b in x),
            tuple(busy_s * a for a in x),
            tuple(cpu_s * a for a in x),
            busy_s**2,
            cpu_s**2,
        )
        return self.combined(one, 1.0)

    def since(self, earlier: PassSums) -> PassSums:
        """Returns the sums over what came after `earlier`, of the same process."""
        return self.combined(earlier, -1.0)

    def combined(self, other: PassSums, factor: float) -> PassSums:
        """Returns these sums and `factor` times the others."""

        def added(mine: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(a + factor * b for a, b in zip(mine, theirs, strict=True))

        return PassSums(
            added(self.gram, other.gram),
            added(self.busy, other.busy),
            added(self.cpu, other.cpu),
            self.busy_squares + factor * other.busy_squares,
            self.cpu_squares + factor * other.cpu_squares,
        )


class ServerWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells what a server's first rank has done since it started, by kind of pass.

    decode: a token for each request; its tokens are those in the KV cache. prefill: prompts, and
    requests to be scored; its tokens are those that are computed.
    """

    decode: PassSums = PassSums()
    prefill: PassSums = PassSums()

    def since(self, earlier: ServerWork) -> ServerWork:
        """Returns what was done after `earlier`, by the same process."""
        return ServerWork(self.decode.since(earlier.decode), self.prefill.since(earlier.prefill))

    def combined(self, other: ServerWork) -> ServerWork:
        """Returns what two servers did together."""
        return ServerWork(
            self.decode.combined(other.decode, 1.0), self.prefill.combined(other.prefill, 1.0)
        )
