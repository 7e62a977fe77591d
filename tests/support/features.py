"""Tests say here what they need of a machine; where it is missing they are skipped with the reason.

Where CI is set they fail instead: continuous integration runs every test but those of a GPU.
"""

import os
from collections.abc import Callable
from functools import cache

import pytest

from megatron_opd.data.verifiers.sandbox.run import isolation_problem
from tests.support import browser, networks

REASONS: dict[str, Callable[[], str | None]] = {
    "browser": browser.why_not,
    "isolation": isolation_problem,
    "namespaces": networks.why_not,
}
"""By feature, the function that says why this machine lacks it; it returns None if it does not."""
needs = pytest.mark.needs


@cache
def _reason(feature: str) -> str | None:
    return REASONS[feature]()


def require(feature: str) -> None:
    """Skip the running test if the feature is missing; fail it where CI is set."""
    if (reason := _reason(feature)) is None:
        return
    message = f"no {feature} on this machine: {reason}"
    if os.environ.get("CI", "false") not in ("", "false"):
        pytest.fail(f"{message}; in CI nothing may be missing", pytrace=False)
    pytest.skip(message)
