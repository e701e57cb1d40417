"""The statistics of a cache."""

from __future__ import annotations

from forebay._engine.stats import Usage
from forebay.origin import Origin
from forebay.reports import Stats


def statistics(origin: Origin) -> Stats:
    """See `Cache.stats`."""
    store = origin.store
    try:
        now, counts = store.usage(), store.counts()
    except OSError as error:
        if store.keeps and store.root.read_only:
            raise  # the caller opened the root to inspect it
        origin.warn("stats", "the statistics of the cache cannot be read: %s", error)
        now, counts = Usage(0, 0, 0), {}
    return Stats.of(now, counts)
