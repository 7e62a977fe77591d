"""Makes the arrays of simulated responses: views of a few shared ones, so that none takes memory.

A response's ids are zeros, its cache holds the path alone with log-probs of 0: nothing may be read
from them but their number.
"""

from __future__ import annotations

import numpy as np

from sglang_bridge.protocol import DrawCache, FloatArray, IntArray, OffsetArray


class SharedArrays:
    """Holds the shared arrays, which grow with the longest request."""

    def __init__(self) -> None:
        self._caches: dict[int, DrawCache] = {}
        self._make(4096)

    def _make(self, length: int) -> None:
        self._ids: IntArray = np.zeros(length, np.int32)
        self._zeros: FloatArray = np.zeros(length, np.float32)
        self._ones: FloatArray = np.ones(length, np.float32)
        self._places: OffsetArray = np.arange(length, dtype=np.int64)
        for array in (self._ids, self._zeros, self._ones, self._places):
            array.flags.writeable = False

    def _reach(self, length: int) -> None:
        if length > len(self._ids):
            self._make(2 * length)

    def ids(self, length: int) -> IntArray:
        """Return int32 [length] of zeros."""
        self._reach(length)
        return self._ids[:length]

    def zeros(self, length: int) -> FloatArray:
        """Return float32 [length] of zeros."""
        self._reach(length)
        return self._zeros[:length]

    def ones(self, length: int) -> FloatArray:
        """Return float32 [length] of ones."""
        self._reach(length)
        return self._ones[:length]

    def places(self, length: int) -> OffsetArray:
        """Return int64 [length], counting from 0."""
        self._reach(length)
        return self._places[:length]

    def cache(self, length: int) -> DrawCache:
        """Return a cache of the path alone, of so many tokens."""
        found = self._caches.get(length)
        if found is None:
            found = self._caches[length] = DrawCache(
                offsets_T1=self.places(length + 1),
                ids_N=self.ids(length),
                weight_N=self.ones(length),
                sampler_logp_N=self.zeros(length),
                path_T=self.places(length),
            )
        return found
