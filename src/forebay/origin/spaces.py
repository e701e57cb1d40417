"""The spaces of entries that have a URL, and how long a version counts as current."""

from __future__ import annotations

URLS, DIRECTORIES, LISTINGS = "urls", "directories", "listings"
"""The spaces of entries that have a URL: objects, trees of links to objects, and listings of directories."""

FOREVER = 1 << 60
"""Nanoseconds: 36 years. An invalidated entry (validated in 1970) is older even than this."""

POSTPONED = 30_000_000_000
"""Nanoseconds until a remote that could not be reached is asked again whether an object has changed."""
