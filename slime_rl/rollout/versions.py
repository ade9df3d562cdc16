"""Which weights sampled each token, as the engine reports it."""

from __future__ import annotations

from typing import Any


def token_versions(meta_info: dict[str, Any], num_tokens: int) -> list[int]:
    """The weight version of every output token `[n]`, from the `meta_info` of an engine's /generate answer.

    The engine reports spans `{"version", "start", "end"}` over its output tokens; a request without an update in
    between has one. Engines are launched with version 0, later versions are what the weight sync gave them.

    Raises:
        ValueError: the spans do not cover the tokens one after another, or a version is not a number (such as that of
            an update that was broken off).
    """
    if num_tokens == 0:
        return []
    spans = meta_info.get("weight_versions")
    if spans is None:
        if "weight_version" not in meta_info:
            raise ValueError(f"the engine's answer names no weight version; its meta_info has {sorted(meta_info)}")
        spans = [{"version": meta_info["weight_version"], "start": 0, "end": num_tokens}]
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else [spans]:
        if not isinstance(span, dict) or not all(type(span.get(key)) is int for key in ("start", "end")):
            raise ValueError(f"weight-version spans must be objects with version, start and end, got {spans}")
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise ValueError(f"weight-version spans must follow one another from token 0, got {spans}")
        versions += [_number(span.get("version"))] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ValueError(f"weight-version spans cover {len(versions)} of {num_tokens} tokens: {spans}")
    return versions


def _number(version: Any) -> int:
    text = str(version) if type(version) is int else version
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()):
        raise ValueError(f"weight version {version!r} is not a number from 0 on: its update did not complete")
    return int(text)
