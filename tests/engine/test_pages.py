"""Listings, checks and removals have a page of rows in memory, and hold no lock while they are not reading it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine import check, seeing
from forebay._engine.catalog import entries
from forebay._engine.catalog.connection import Catalog
from forebay._engine.space import eviction
from forebay.cache import entries as listing
from forebay.cli import output
from tests.harness import MiB
from tests.processes import fork

COUNT = 300
MOST = 60
"""Rows of one statement: the columns of all tables, or a page."""


@pytest.fixture
def cache(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[forebay.Cache]:
    for module, name, value in (
        (seeing, "ENTRIES_PER_PAGE", 20), (check, "AT_ONCE", 20), (entries, "RANGE", 20),
        (eviction, "REMOVED_AT_ONCE", 16), (listing, "IN_MEMORY", 50),
        (output, "PAGE_ROWS", 20),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    with forebay.Cache(quick_path / "root", budget=64 * MiB) as found:
        for n in range(COUNT):
            found.put(f"k{n * 7 % COUNT:03}", b"x" * (100 + n))
        found.put("large", bytes(MiB))
        found.space("other").put("o", b"y")
        yield found


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each statement gave, and whether anybody else could write meanwhile."""
    rows: list[int] = []
    real = Catalog.all

    def counting(self: Catalog, sql: str, *values: Any) -> list[Any]:
        found = real(self, sql, *values)
        rows.append(len(found))
        return found

    monkeypatch.setattr(Catalog, "all", counting)
    return rows


def test_entries_in_each_order(cache: forebay.Cache, most: list[int]) -> None:
    entries = cache.entries()
    assert len(entries) == COUNT + 2
    names = [entry.name for entry in entries.by_name()]
    assert names == sorted(names)
    assert list(entries.names()) == names
    assert list(entries.names(backwards=True)) == names[::-1]
    assert [entry.name for entry in entries.by_name(backwards=True)] == names[::-1]
    used = [entry.used for entry in entries]
    assert used == sorted(used)
    sizes = [entry.size for entry in entries.sorted_by(lambda entry: entry.size, backwards=True)]
    assert sizes == sorted(sizes, reverse=True)
    assert (entries[0].key, entries[-1].space) == ("k000", "other")
    assert [entry.key for entry in cache.entries("other")] == ["o"]
    assert cache.entries("missing") == []
    assert max(most) <= MOST


def test_what_is_leased_is_told_page_by_page(cache: forebay.Cache) -> None:
    with cache.hold("large"):
        assert [entry.key for entry in cache.entries() if entry.leased] == ["large"]
    assert not any(entry.leased for entry in cache.entries())


def test_checks_and_removals_read_in_pages(cache: forebay.Cache, most: list[int]) -> None:
    assert cache.check(deep=True) == []
    assert len(cache.prune().victims) == 0
    plan = cache.clear()
    assert not isinstance(plan.victims, tuple)
    report = plan.execute()
    assert len(report.removed) == COUNT + 2
    assert cache.entries() == []
    assert cache.check() == []
    assert max(most) <= MOST


def test_what_a_long_listing_meets_while_others_write(cache: forebay.Cache) -> None:
    """Nothing is in it twice, and what was there all the time is in it; who writes waits for nothing."""
    there = {entry.name for entry in cache.entries()}
    path = cache.path
    found = []
    for n, entry in enumerate(cache.entries().by_name()):
        found.append(entry.name)
        if n % 100 == 0:

            def write(n: int = n) -> None:
                with forebay.Cache(path) as other:
                    for k in range(10):
                        other.put(f"a{n}-{k}", b"new")

            fork(write).result()
    assert len(found) == len(set(found))
    assert there <= set(found)


def test_a_table_of_any_length_has_one_header(cache: forebay.Cache, capsys: pytest.CaptureFixture[str]) -> None:
    output.Output().entries(cache.entries().by_name())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == COUNT + 3
    assert sum("NAME" in line for line in lines) == 1
    assert len({line.index("other:o" if "other:o" in line else "values:" if "values:" in line else "NAME") for line in lines}) == 1


def test_what_the_budget_does_not_count_is_told(cache: forebay.Cache) -> None:
    """Together they are all that lies on the disk."""
    told = cache.overhead()
    assert set(told) == {"log", "slots", "directories", "other"}
    assert 0 < told["log"] <= 17 * MiB
    assert told["slots"] >= MiB
    on_disk = sum(path.lstat().st_blocks * 512 for path in [Path(cache.path), *Path(cache.path).rglob("*")])
    assert on_disk <= cache.stats().bytes_used + sum(told.values())
    assert on_disk >= sum(told.values()) - 8 * MiB
