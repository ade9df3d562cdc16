"""Version spans of an answer become one version per token, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from slime_rl.rollout.versions import token_versions


def spans(*parts: tuple[str, int, int]) -> dict[str, Any]:
    return {"weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in parts]}


def test_spans_become_one_version_per_token() -> None:
    assert token_versions(spans(("3", 0, 2), ("4", 2, 5)), 5) == [3, 3, 4, 4, 4]


def test_an_empty_first_span_is_harmless() -> None:
    assert token_versions(spans(("3", 0, 0), ("4", 0, 2)), 2) == [4, 4]


def test_no_tokens_need_no_versions() -> None:
    assert token_versions({}, 0) == []


def test_an_answer_without_spans_has_one_version() -> None:
    assert token_versions({"weight_version": "7"}, 3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (spans(("3", 0, 2)), "cover 2 of 3 tokens"),
        (spans(("3", 0, 1), ("4", 2, 3)), "must follow one another"),
        (spans(("3", 1, 3)), "must follow one another"),
        (spans(("4-incomplete", 0, 3)), "'4-incomplete' is not a number from 0 on: its update did not complete"),
        (spans(("-1", 0, 3)), "'-1' is not a number from 0 on"),
        ({"weight_version": None}, "None is not a number from 0 on"),
        ({"weight_version": True}, "True is not a number from 0 on"),
        ({"weight_version": " 3_0 "}, "' 3_0 ' is not a number from 0 on"),
        ({"weight_versions": {"version": "3"}}, "must be objects with version, start and end"),
        ({"weight_versions": [{"version": "3", "start": 0}]}, "must be objects with version, start and end"),
        ({"id": "x"}, r"names no weight version; its meta_info has \['id'\]"),
    ],
)
def test_what_does_not_fit_is_an_error(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_versions(meta, 3)
