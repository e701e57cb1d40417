"""What the tests of claims share: a node of their own, a claim without one, and processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.claims import shared
from forebay.claims.members import Members
from forebay.claims.registry import Registry
from tests.claiming import registry  # noqa: F401 (a fixture)
from tests.claims import contexts


@pytest.fixture
def node(registry: Path) -> Registry:  # noqa: F811
    """The registry, made."""
    return Registry()


@pytest.fixture
def place(quick_path: Path) -> Path:
    """A claim's directory."""
    return contexts.create(quick_path / "claim")


@pytest.fixture
def context(place: Path) -> Iterator[Members]:
    """The claim of which this process is the leader."""
    leader = contexts.leader(place)
    yield leader
    shared.close(leader)
    leader.leave()
