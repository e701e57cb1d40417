"""Signals wait while a page of a listing is read: an interrupt is neither lost nor taken for a fault of the cache."""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine.catalog import entries as catalog_entries
from forebay.cache import entries
from tests.harness import MiB
from tests.interrupts.signals import handler_that_raises, interrupted_after

READS = {
    "by_name": ("page", lambda cache: list(cache.entries().by_name())),
    "backwards": ("page", lambda cache: list(cache.entries("values").by_name(backwards=True))),
    "filtered": ("page", lambda cache: list(entries.Entries(cache._store, "values", lambda entry: True).names())),
    "names": ("page_of_keys", lambda cache: list(cache.entries().names())),
    "facts": ("page_of_facts", lambda cache: list(cache.entries().facts())),
    "sorted": ("page", lambda cache: list(cache.entries())),
    "bool": ("page", lambda cache: bool(cache.entries())),
    "repr": ("page", lambda cache: repr(cache.entries())),
    "equality": ("page", lambda cache: cache.entries() == []),
    "plan": ("page", lambda cache: cache.plan(space="values")),
}  # fmt: skip
"""The function that reads a page, and a call that lists."""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=32 * MiB, min_free=0) as cache:
        for number in range(20):
            cache.put(f"k{number}", b"x" * (30_000 if number % 2 else 10))
            cache.space("other").put(f"k{number}", b"x")
        yield cache


@pytest.mark.parametrize("name", READS)
def test_a_listing_raises_what_a_handler_did(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read, call = READS[name]
    with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
        interrupted_after(patch, catalog_entries, read)
        call(cache)
    call(cache)
    assert cache.put("after", b"x" * 30_000)


def test_an_order_in_a_temporary_file_raises_what_a_handler_did(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "IN_MEMORY", 3)
    listed = cache.entries().sorted_by(lambda entry: entry.size)
    with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
        interrupted_after(patch, marshal, "loads", at=2)
        list(listed)
    monkeypatch.setattr("forebay._engine.catalog.spill.ROWS", 3)
    assert [entry.name for entry in cache.entries().sorted_by(lambda entry: entry.size)] == [
        entry.name for entry in sorted(cache.entries().by_name(), key=lambda entry: entry.size)
    ]


def test_victims_are_guarded(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "IN_MEMORY", 3)
    victims = cache.plan(space="values").victims
    assert isinstance(victims, entries.Victims)
    for call in (bool, list[Any], lambda found: next(iter(found)), len):
        with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            interrupted_after(patch, catalog_entries, "page")
            call(victims)
    assert bool(victims)
