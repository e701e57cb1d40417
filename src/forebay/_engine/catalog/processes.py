"""Statements about the processes that have the root open, and the failures that their waiters share."""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay._engine.catalog import checked
from forebay._engine.catalog.connection import Rows, Txn


class Owner(NamedTuple):
    """A process that writes to the root. All but ``id`` is information for people, never for liveness."""

    id: int
    pid: int
    pidns: str
    host: str
    start: float
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.command})"


_FROM = "SELECT id, pid, pidns, host, start, command FROM owners"
KEEP_FAILURES = 1000


def insert(txn: Txn, owner: Owner) -> None:
    txn.run(
        "INSERT INTO owners VALUES (?, ?, ?, ?, ?, ?, ?)",
        owner.id, owner.id, owner.pid, owner.pidns, owner.host, owner.start, owner.command,
    )  # fmt: skip


def delete(txn: Txn, id: int) -> None:
    txn.run("DELETE FROM owners WHERE id = ?", id)


def every(rows: Rows) -> list[Owner]:
    return [Owner(*row) for row in rows.all(_FROM) if checked.owner(rows, row)]


def by_id(rows: Rows, id: int) -> Owner | None:
    row = rows.one(f"{_FROM} WHERE id = ?", id)
    return Owner(*row) if row and checked.owner(rows, row) else None


def failure(rows: Rows, space: int, key: str) -> tuple[int, dict[str, Any]] | None:
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
    if not checked.is_number(at) or not isinstance(error, dict) or not isinstance(error.get("facts") or {}, dict):
        rows.report_unreadable("failures", (space, key), f"the failure of {key!r}")
        return None
    return at, error


def failures(rows: Rows, most: int) -> list[tuple[int, str, int, dict[str, Any]]]:
    """The last failures, newest first: space, key, when, and the error as in `failure`."""
    keys = rows.all("SELECT space, key FROM failures ORDER BY at DESC LIMIT ?", most)
    found = [(space, key, failure(rows, space, key)) for space, key in keys]
    return [(space, key, *one) for space, key, one in found if one is not None]


def record_failure(txn: Txn, space: int, key: str, error: dict[str, Any], at: int) -> None:
    """Record that an attempt failed, for the processes that wait. ``at``: nanoseconds of the node's monotonic clock."""
    import json

    txn.run(
        "INSERT INTO failures VALUES (?, ?, ?, ?) ON CONFLICT(space, key) DO UPDATE SET error = excluded.error, at = excluded.at",
        space, key, json.dumps(error), at,
    )  # fmt: skip
    txn.run("DELETE FROM failures WHERE at < (SELECT at FROM failures ORDER BY at DESC LIMIT 1 OFFSET ?)", KEEP_FAILURES)


def forget_failures(txn: Txn) -> None:
    """After a reboot: the clock of their times has restarted."""
    txn.run("DELETE FROM failures")
