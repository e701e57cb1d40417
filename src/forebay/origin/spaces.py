"""The spaces of entries that have a URL, the keys of parts of objects, and how long a version counts as current."""

from __future__ import annotations

URLS, DIRECTORIES, LISTINGS = "urls", "directories", "listings"
"""The spaces of entries that have a URL: objects, trees of links to objects, and listings of directories."""

FOREVER = 1 << 60
"""Nanoseconds: 36 years. An invalidated entry (validated in 1970) is older even than this."""

POSTPONED = 30_000_000_000
"""Nanoseconds until a remote that could not be reached is asked again whether an object has changed."""


def index_key(key: str) -> str:
    """The key of the entry that describes the version of an object of which blocks are cached, from the key of the object. It has no
    bytes: size and validator are in its row."""
    return f"{key}#blocks"


def block_key(key: str, number: int, size: int, validator: str | None) -> str:
    """The key of block ``number`` of ``size`` bytes of one version of an object."""
    return f"{key}#block={number}&size={size}&version={validator}"


def key_of_whole(key: str) -> str | None:
    """The key of the object, from that of its index; None for any other key."""
    return key.removesuffix("#blocks") if key.endswith("#blocks") else None


def prefix_of_parts(key: str) -> str:
    """What the keys of an object's index, and of all of its blocks, begin with."""
    return f"{key}#block"
