"""What another user of the machine puts into the directories that claims of all users share."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from forebay.adapters.streaming import get_shm_prefix, names
from forebay.claims.registry import VARIABLE, Registry
from forebay.world import World
from tests.processes import as_user

ATTACKER, VICTIM = 61_001, 61_002
REMOTE = "https://host/data/"
LARGE = 1 << 40  # bytes, none of which is on the disk


def put_fifo(path: str, home: Path) -> None:
    os.mkfifo(path, 0o666)


def put_link(path: str, home: Path) -> None:
    os.mkfifo(home / "fifo", 0o666)
    os.symlink(home / "fifo", path)


def put_large(path: str, home: Path) -> None:
    with open(path, "wb") as file:
        file.write(names.pack(["/data"], 7))
        file.truncate(LARGE)


def put_directory(path: str, home: Path) -> None:
    os.mkdir(path)


@pytest.fixture
def number() -> Iterator[int]:
    """A number that no job of this node has."""
    number = random.randrange(500_000, 999_999)
    yield number
    path = Path(names.paths_of(number)[0])
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.mark.root
@pytest.mark.parametrize("put", [put_fifo, put_link, put_large, put_directory])
def test_what_is_called_like_streamings_memory_hangs_no_claim(
    public: Path, number: int, children: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, put: Callable[[str, Path], None]
) -> None:
    """A FIFO opened to read waits for a writer, which never comes; of a file of a terabyte all would be read."""
    monkeypatch.setenv(VARIABLE, str(public / "claims"))
    for uid in (ATTACKER, VICTIM):
        (public / str(uid)).mkdir()
        os.chown(public / str(uid), uid, uid)
    Registry()
    children(as_user(ATTACKER, lambda: put(names.paths_of(number)[0], public / str(ATTACKER)))).result()

    def claim() -> int:
        prefix, memory = get_shm_prefix([str(public / str(VICTIM))], [REMOTE], World(1, 1, 1, 0))
        memory.cleanup()
        return prefix

    assert children(as_user(VICTIM, claim)).result() != number


@pytest.mark.root
def test_no_file_of_another_job_is_read_under_the_lock_of_the_registry(public: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(public / "claims"))
    Path(names.paths_of(number)[0]).write_bytes(names.pack(["/elsewhere"], number))
    read, seen = names.unpack, []

    def unpack(data: bytes) -> list[str]:
        with Registry().locked(timeout=5):  # raises `WaitTimeout` if this thread has it already: locks belong to descriptors
            seen.append(read(data))
        return read(data)

    monkeypatch.setattr(names, "unpack", unpack)
    _, memory = get_shm_prefix([str(public)], [REMOTE], World(1, 1, 1, 0))
    memory.cleanup()
    assert ["/elsewhere"] in seen
