"""What another user of the machine puts into the directories that claims of all users share."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")

import forebay
from forebay import errors
from forebay.adapters.streaming import get_shm_prefix, names
from forebay.claims import records
from forebay.claims.registry import VARIABLE, Registry
from forebay.cli import checkup
from forebay.world import World
from tests.processes import USERS, Gate, as_user

ATTACKER, VICTIM = USERS
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


@pytest.mark.root
@pytest.mark.parametrize(
    ("claimed", "wanted", "conflicts"),
    [
        ("/", "home/data", False),
        ("home", "home/data", False),
        ("home/data", "home/data", False),
        ("project", "project/run", False),
        ("scratch", "scratch/mine", True),
        ("scratch/mine/sub", "scratch/mine", True),
        ("theirs", "theirs", True),
    ],
)
def test_a_claim_counts_where_its_owner_may_write(
    public: Path, children: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, claimed: str, wanted: str, conflicts: bool
) -> None:
    monkeypatch.setenv(VARIABLE, str(public / "claims"))
    for name, uid, gid, mode in (
        ("home", VICTIM, VICTIM, 0o755), ("home/data", VICTIM, VICTIM, 0o755), ("project", VICTIM, 61_005, 0o2770),
        ("scratch", 0, 0, 0o1777), ("theirs", ATTACKER, ATTACKER, 0o777),
    ):  # fmt: skip
        (public / name).mkdir()
        os.chown(public / name, uid, gid)
        (public / name).chmod(mode)
    monkeypatch.setattr(records.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=f"u{uid}", pw_gid=uid))
    Registry()
    held, done = Gate(), Gate()

    def attack() -> None:
        with forebay.claim(public / claimed if claimed != "/" else "/", REMOTE, World(1, 1, 1, 0), job="attack"):
            held.open()
            done.wait()

    def claim() -> str:
        try:
            forebay.claim(public / wanted, REMOTE, World(1, 1, 1, 0), job="own").close()
        except errors.ClaimConflict as error:
            return str(error)
        return ""

    attacker = children(as_user(ATTACKER, attack))
    held.wait()
    said = children(as_user(VICTIM, claim)).result()
    done.open()
    attacker.result()
    assert bool(said) == conflicts, said


@pytest.mark.root
def test_doctor_tells_of_a_registry_that_another_user_owns(
    public: Path, children: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(public / "claims"))
    registry = public / "claims"

    def found() -> list[tuple[str, str]]:
        return [(finding.state, finding.todo) for finding in checkup._claims(registry)]

    Registry()
    assert children(as_user(VICTIM, found)).result() == [("ok", "")]
    os.chown(registry / "lock", ATTACKER, ATTACKER)
    ((state, todo),) = children(as_user(VICTIM, found)).result()
    assert state == "slow"
    assert "have root create the registry at boot" in todo
    os.chown(registry, VICTIM, VICTIM)
    os.chown(registry / "lock", VICTIM, VICTIM)
    assert children(as_user(VICTIM, found)).result() == [("ok", "")]


@pytest.mark.parametrize(("code", "counts"), [(errno.ENOTSUP, False), (errno.EIO, True)])
def test_without_access_lists_the_mode_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, counts: bool) -> None:
    """A claim counts where it cannot be known who may write."""

    def listxattr(path: str) -> list[str]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "listxattr", listxattr)
    tmp_path.chmod(0o755)
    assert records.may_write(ATTACKER, records.canonical(tmp_path)) is counts
