"""Statements about failures, which reach the processes that wait for a key."""

from __future__ import annotations

from typing import Any

from forebay._engine.catalog import checked
from forebay._engine.catalog.transactions import Rows, Txn

KEPT = 1000


def of(rows: Rows, space: str, key: str) -> tuple[int, dict[str, Any]] | None:
    """The last failure of a key: when, and the error as `errors.to_wire` wrote it."""
    import json

    row = rows.one("SELECT at, error FROM failures WHERE space = ? AND key = ?", space, key)
    if row is None:
        return None
    at, text = row
    try:
        error = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        error = None
    named = type(space) is type(key) is str
    if not named or not checked.is_number(at) or not isinstance(error, dict) or not isinstance(error.get("facts") or {}, dict):
        rows.report_unreadable("failures", (space, key), f"the failure of {key!r}")
        return None
    return at, error


def latest(rows: Rows, most: int) -> list[tuple[str, str, int, dict[str, Any]]]:
    """The last failures, newest first: space, key, when, and the error as in `of`."""
    keys = rows.all("SELECT space, key FROM failures ORDER BY at DESC LIMIT ?", most)
    found = [(space, key, of(rows, space, key)) for space, key in keys]
    return [(space, key, *one) for space, key, one in found if one is not None]


def record(txn: Txn, space: str, key: str, error: dict[str, Any], at: int) -> None:
    """Record that an attempt failed, for the processes that wait. ``at``: nanoseconds of the node's monotonic clock."""
    import json

    txn.run(
        "INSERT INTO failures VALUES (?, ?, ?, ?) ON CONFLICT(space, key) DO UPDATE SET error = excluded.error, at = excluded.at",
        space, key, json.dumps(error), at,
    )  # fmt: skip
    txn.run("DELETE FROM failures WHERE at < (SELECT at FROM failures ORDER BY at DESC LIMIT 1 OFFSET ?)", KEPT)


def forget(txn: Txn) -> None:
    """After a reboot: the clock of their times has restarted."""
    txn.run("DELETE FROM failures")
