"""A claim's directory without a registry, for what works below a claim."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from forebay._kernel import locks
from forebay.claims import members
from forebay.claims.claim_files import CLAIM, LEADER, LOCKS, TABLE, TABLE_BYTES, WORDS
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.members import Members
from forebay.claims.processes import JobId

T = TypeVar("T")
RECORD = ClaimRequest(JobId("job", "job", "job="), "0", ()).record(0)


def create(place: Path) -> Path:
    """Create a claim's directory without members."""
    place.mkdir()
    for name, size in ((TABLE, TABLE_BYTES), (LOCKS, 0), (WORDS, 4096)):
        (place / name).write_bytes(bytes(size))
    (place / CLAIM).write_bytes(RECORD.dump())
    return place


def leader(place: Path, rank: int | None = 0) -> Members:
    """Join as the process that registered it."""
    fd = os.open(place / CLAIM, os.O_RDWR | os.O_CLOEXEC)
    assert locks.take(fd, LEADER)
    return Members(place, fd, LEADER, RECORD, rank)


def join(place: Path, rank: int | None = None) -> Members:
    """Join as a later process."""
    return Members.attach(place, rank=rank)


def rank(place: Path, number: int, work: Callable[[Members], T]) -> T:
    """Do work as a rank that joins the claim by itself, and leave it at the end. A child of ours is no member as such."""
    members.leave_all()
    return leaving(join(place, number), work)


def leaving(context: Members, work: Callable[[Members], T]) -> T:
    """Do work as a process that ends in order."""
    try:
        return work(context)
    finally:
        context.leave()
