"""The version of a root covers the formats of all its files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import forebay
from forebay._engine.catalog import schema
from forebay._engine.files.layout import VERSION

ENGINE = Path(forebay.__file__).parent / "_engine"
KNOWN = {3: "73d6338f9a2ca61d"}
"""For each version, the digest of the formats that it stands for. Raise `VERSION` and add a line: never change one of a release."""


def formats() -> list[str]:
    """What tells the formats of a root's files apart: the tables of the catalog, and the marks of the other files."""
    marks = {mark for path in ENGINE.rglob("*.py") for mark in re.findall(r'b"(FB[A-Z]+[0-9]*)"', path.read_text())}
    return [str(schema.FORMAT), schema.TABLES, *sorted(marks)]


def test_each_change_of_a_format_raises_the_version() -> None:
    assert len(formats()) > 12
    assert hashlib.sha256("\n".join(formats()).encode()).hexdigest()[:16] == KNOWN[VERSION]
