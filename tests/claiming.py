"""Claims of tests: a node for each test, and what its registry holds."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay

REMOTE = "s3://bucket/train"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node of its own for the test. At its end nobody lives any more, and the next claim frees what all have left."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir=memory) as name:
        place = Path(name) / "claims"
        Path(name).chmod(0o1777)
        monkeypatch.setenv("FOREBAY_CLAIMS", str(place))
        yield place
        if place.is_dir():
            assert are_all_freed(place)


def are_all_freed(place: Path) -> bool:
    """Whether a claim frees what is left, once what was killed is gone."""
    deadline = time.monotonic() + 60
    while True:
        forebay.claim("/last", REMOTE, job="last").close()
        if claims_in(place) == [] or time.monotonic() > deadline:
            return claims_in(place) == []
        time.sleep(0.02)


def claims_in(registry: Path) -> list[str]:
    """The directories of claims that lie there."""
    return sorted(name for name in os.listdir(registry) if re.fullmatch(r"\d{6}\..*|\..*", name))


def files(*places: Path) -> tuple[int, int]:
    """How many files lie below, and the bytes of their blocks."""
    found = [path.lstat() for place in places for path in place.rglob("*") if not path.is_dir()]
    return len(found), sum(status.st_blocks for status in found) * 512


def alone() -> forebay.World:
    return forebay.World(1, 1, 1, 0)


def rank(number: int, of: int) -> forebay.World:
    return forebay.World(1, of, 1, number)


def text_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)
