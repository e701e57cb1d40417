"""The reference pages show a parameter that a docstring describes as a row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools import tool

griffe = pytest.importorskip("griffe")

REPO = Path(__file__).parents[2]


def loaded(name: str) -> Any:
    """What a page knows of an object, with the extensions that mkdocs.yml names."""
    paths = [line.split("[")[1].rstrip("]") for line in (REPO / "mkdocs.yml").read_text().splitlines() if "extensions: [" in line]
    loader = griffe.GriffeLoader(search_paths=[REPO / "src"], extensions=griffe.load_extensions(*(str(REPO / path) for path in paths)))
    loader.load("forebay")
    return loader.modules_collection[name]


def test_a_parameter_that_a_docstring_describes_is_a_row() -> None:
    before, table, after = loaded("forebay.cache.Cache.read").docstring.parsed
    assert [row.name for row in table.value][:4] == ["refresh", "sha256", "etag", "bypass"]
    assert (str(table.value[0].annotation), table.value[0].default) == ("bool", "False")
    assert "Raises `RemoteError`." in after.value
    assert "``refresh``" not in before.value + after.value


def test_what_a_call_returns_has_attributes_and_no_constructor() -> None:
    claim = loaded("forebay.claims.Claim")
    assert [section.kind.value for section in claim.docstring.parsed] == ["text", "attributes", "text"]
    assert "__init__" not in claim.members


def test_a_clause_ends_before_the_next_one_and_before_what_is_no_description() -> None:
    with tool("parameter_tables") as module:
        assert module.pieces("It reads. ``a``, ``b``: these, see `c`. More; ``d``: else. Raises X.") == [
            ("", "It reads."),
            ("``a``, ``b``", "These, see `c`. More."),
            ("``d``", "Else."),
            ("", "Raises X."),
        ]
