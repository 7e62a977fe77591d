"""Packs bins first-fit: finds the first of many that has room, in O(log n)."""

from __future__ import annotations


class FirstFitBins:
    """Holds the free tokens of `count` bins of `budget` tokens; at least one bin.

    A tree in an array: node i has the children 2 i and 2 i + 1 and tells the most room of any bin
    below it; the leaves are the bins, in order.
    """

    def __init__(self, budget: int, count: int) -> None:
        self._budget = budget
        self._leaves = 1 << (count - 1).bit_length()
        self._most = [budget] * (2 * self._leaves)

    def take(self, tokens: int) -> int:
        """Put so many tokens into the first bin that has room for them; return which it is.

        More than the budget takes an empty bin, the first, for itself.
        """
        node, wanted, most = 1, min(tokens, self._budget), self._most
        while node < self._leaves:
            node *= 2
            node += most[node] < wanted
        found = node - self._leaves
        most[node] -= tokens
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
        return found
