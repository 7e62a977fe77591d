"""Programs for the sandbox, and where it can run them."""

import json
import os

import pytest

from megatron_opd.data.verifiers.sandbox.run import isolation_problem

PROBLEM = isolation_problem()
isolated = pytest.mark.skipif(
    PROBLEM is not None and "CI" not in os.environ, reason=f"no isolation here: {PROBLEM}"
)
ADDS = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ASSERTS = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]})
