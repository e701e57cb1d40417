"""The SHA-256 that the bytes of an object must have."""

from __future__ import annotations

from forebay import errors
from forebay._model import ObjectInfo
from forebay.origin.request import FetchOptions, Target


def expected_sha256(options: FetchOptions, info: ObjectInfo | None) -> set[str]:
    """The digests that the bytes must have: the caller's, and the remote's."""
    return {digest.lower() for digest in (options.sha256, info.sha256 if info is not None else None) if digest}


def sha256_mismatch(target: Target, expected: set[str], digest: str) -> errors.ChecksumMismatch:
    other = min(expected - {digest})
    return errors.ChecksumMismatch.of(target.key, f"sha256 {other}", f"sha256 {digest}")
