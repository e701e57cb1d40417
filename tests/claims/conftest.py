"""What the tests of claims share: a node of their own, and processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay._claims.registry import Registry
from tests.claiming import registry  # noqa: F401 (a fixture)
from tests.harness import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    found = Crew()
    yield found
    found.dismiss()


@pytest.fixture
def node(registry: Path) -> Registry:  # noqa: F811
    """The registry, made."""
    return Registry()
