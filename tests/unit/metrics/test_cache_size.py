"""Bytes of the caches of a batch."""

from megatron_opd.metrics.cache_size import CacheSizes
from megatron_opd.records.types import Batch
from tests.support.fakes import make_sample


def test_cache_size():
    sample = make_sample(0, num_tokens=4)
    cache = CacheSizes()
    assert cache.bytes_per_token is None
    cache.add(Batch(0, 0, (sample,)))
    # rows alternate between weights (1, 0) and (0.25, 0.75)
    assert cache.distinct_ids_per_token == 1.5
    assert cache.cached_ids_per_token == 2.0
    assert sample.cache.nbytes == 8 * 16 + 4 * (8 + 8 + 4) + 8
    assert cache.bytes_per_token == sample.cache.nbytes / 4
