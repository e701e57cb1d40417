"""What a cache tells of itself: statistics and history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay import errors
from forebay.origin import Origin
from forebay.origin.request import FetchOptions

if TYPE_CHECKING:
    from forebay.reports import HistoryPoint, Stats

# Imports are late: most programs never look.


def stats(origin: Origin) -> Stats:
    """See `Cache.stats`."""
    from forebay._engine.seeing import Usage
    from forebay.reports import Stats

    store = origin.store
    try:
        return Stats.of(store.seeing.usage(), store.seeing.counts())
    except OSError as error:
        if store.keeps and store.root.read_only:
            raise  # the caller opened the root to inspect it
        origin.warn("stats", "the statistics of the cache cannot be read: %s", error)
        return Stats.of(Usage(0, 0, 0), {})


def watched(options: FetchOptions) -> FetchOptions:
    """The options of a call in a notebook, whose fetch shows a bar."""
    from forebay.cache.notebook import with_bar

    return with_bar(options)


def as_html(origin: Origin) -> str:
    """A cache in a notebook: its root, how full it is, and its statistics."""
    from html import escape

    from forebay._config import format_size

    found = stats(origin)
    full = f'<progress value="{found.bytes_used}" max="{found.budget}"></progress>' if found.budget else ""
    used = f"{format_size(found.bytes_used)} of {format_size(found.budget)}"
    return f"<p><b>{escape(str(origin.path))}</b> {full} {used}</p>{found._repr_html_()}"


def history(origin: Origin, by: str) -> list[HistoryPoint]:
    """See `Cache.history`."""
    from forebay._engine.seeing import by_name
    from forebay.reports import HistoryPoint

    if by not in ("minute", "hour"):
        raise errors.ConfigError(f"by={by!r}: use 'minute' or 'hour'", name="by", value=by)
    periods = origin.store.seeing.history(hours=by == "hour")
    return [HistoryPoint(one.start, one.end, **by_name(one.counts), bytes_used=one.used, budget=one.budget) for one in periods]
