"""Filters: which entries pass, and what is said of a term that makes no sense."""

from __future__ import annotations

import pytest

from forebay import Entry
from forebay.cli.arguments import parse_filters
from forebay.errors import ConfigError

NOW = 1_000_000_000.0
DAY = 86400


def entry(size: int = 0, used: float = 0, created: float = 0, life: str = "cached", space: str = "urls") -> Entry:
    """``used`` and ``created``: days ago."""
    return Entry(
        id=1, space=space, key="k", kind="blob", size=size, charge=size, slot=0, checksum=b"", validator=None, created=NOW - created * DAY,
        boot="", life=life, used=NOW - used * DAY,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("term", "passes", "fails"),
    [
        ("size>1GB", entry(size=10**9 + 1), entry(size=10**9)),
        ("size >= 1GB", entry(size=10**9), entry(size=10**9 - 1)),
        ("size<1KiB", entry(size=1023), entry(size=1024)),
        ("used>30d", entry(used=31), entry(used=29)),
        ("used<=1d", entry(used=1), entry(used=1.1)),
        ("created<2w", entry(created=13), entry(created=15)),
        ("life=pinned", entry(life="pinned"), entry(life="cached")),
        ("space!=urls", entry(space="values"), entry(space="urls")),
    ],
)
def test_each_filter_term_passes_and_refuses(term: str, passes: Entry, fails: Entry) -> None:
    test = parse_filters([term], now=NOW)
    assert test(passes)
    assert not test(fails)


def test_all_terms_must_hold() -> None:
    test = parse_filters(["size>10", "used>1d"], now=NOW)
    assert [test(entry(size=s, used=u)) for s, u in ((11, 2), (9, 2), (11, 0))] == [True, False, False]


def test_no_term_passes_all() -> None:
    assert parse_filters([])(entry())


@pytest.mark.parametrize("term", ["size", "size>much", "used>30x", "colour=red", "life>pinned", ""])
def test_a_term_that_makes_no_sense(term: str) -> None:
    with pytest.raises(ConfigError):
        parse_filters([term])
