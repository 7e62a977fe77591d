"""Verifies that a response is JSON of the schema in the row's answer (jsonschema package).

The JSON of a response is its last fenced block, or all of it without one. A schema may name its
draft in `$schema`; without it the newest counts. References go within the schema: a schema that
points elsewhere fails, since nothing is fetched.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_opd.data.tasks.base import Task
from megatron_opd.data.tasks.code import last_block


def verify(response: str, answer: str) -> bool:
    """Return whether the response is valid JSON and fits the schema `answer`.

    Raises ValueError for an answer that is no schema, and jsonschema's own error for a reference
    that leads elsewhere.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # the drafts themselves; fetches nothing

    schema = json.loads(answer)
    validator: Any = validator_for(schema)
    try:
        validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the answer is no JSON schema: {error.message}") from None
    try:
        found = json.loads(last_block(response), parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return bool(validator(schema, registry=REGISTRY).is_valid(found))


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def warm() -> None:
    """Import the library."""
    verify("{}", "{}")


JSON_SCHEMA = Task("json_schema", verify=verify, warm=warm)
