"""What is a loopback address."""

import pytest

from sglang_bridge.listening import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost"])
def test_a_loopback_host(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "box", "localhost.evil.org", ""])
def test_a_host_that_others_may_reach(host: str):
    assert not is_loopback(host)
