"""What runs of JSON schema inside the fence."""

from __future__ import annotations

import json
from typing import Any

from jsonschema.exceptions import SchemaError, UnknownType, best_match
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from slime_rl.rollout.rewards.json_schema import BROKEN_SCHEMA


def problem_of(schema: Any, text: str, label: Any) -> str:
    """Why `text` is not right; "" when it is."""
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
        kind(schema).is_valid({})  # a reference that leads nowhere shows, or shows below
    except (SchemaError, UnknownType, Unresolvable) as error:
        return f"{BROKEN_SCHEMA}{str(error).splitlines()[0]}"
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    try:
        problem = best_match(kind(schema).iter_errors(value))
    except Unresolvable as error:
        return f"{BROKEN_SCHEMA}{error}"
    if problem is not None:
        return f"{problem.json_path}: {problem.message}"[:300]
    if isinstance(label, (dict, list)) and not equal(value, label):
        return "not the expected value"
    return ""


def equal(value: Any, label: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are the same number, and neither is true."""
    if isinstance(value, bool) or isinstance(label, bool):
        return value is label
    if isinstance(value, dict) and isinstance(label, dict):
        return value.keys() == label.keys() and all(equal(value[key], label[key]) for key in value)
    if isinstance(value, list) and isinstance(label, list):
        return len(value) == len(label) and all(map(equal, value, label))
    return value == label


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
