"""What runs of JSON schema inside the fence."""

from __future__ import annotations

import json
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for


def problem_of(schema: Any, text: str, label: Any) -> str:
    """Why `text` is not right; "" when it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    validator = validator_for(schema)(schema)
    problem = best_match(validator.iter_errors(value))
    if problem is not None:
        return f"{problem.json_path}: {problem.message}"[:300]
    if isinstance(label, (dict, list)) and value != label:
        return "not the expected value"
    return ""
