"""Programs for the sandbox."""

import json

ADDS = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ASSERTS = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]})
