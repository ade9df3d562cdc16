"""The file that sglang-router reads where it serves several models (--share-router), whatever the models are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
WAY_OUT = f"python tools/fetch_router_vocabulary.py --output DIR makes one for {VARIABLE}=DIR"


def is_vocabulary(content: bytes) -> bool:
    """Whether the router takes a file with this content."""
    return hashlib.sha256(content).hexdigest() == SHA256


def check_vocabulary() -> str:
    """Check the folder of the environment, which the router that we start inherits; what it will do.

    Raises:
        ValueError: the folder does not hold the file, or holds another one.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return f"{VARIABLE} is not set, so sglang-router downloads {NAME} at its start"
    path = Path(folder).absolute() / NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        rule = f"must be a folder that holds {NAME}, which sglang-router reads with --share-router"
        raise ValueError(f"{VARIABLE} {rule} ({WAY_OUT}), got {folder!r}: {path}: {error.strerror}") from error
    if not is_vocabulary(content):
        rule = f"must be the file with the SHA-256 {SHA256} ({WAY_OUT})"
        raise ValueError(f"{VARIABLE} {folder!r}: {path} {rule}, got {len(content)} bytes that are not")
    return str(path)
