"""What is seen of a claim whose processes are on their way out."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import host
from forebay._kernel.locks import LockFile
from forebay.claims.members import Member
from forebay.claims.registry import ClaimState, Registry, parse, read_state
from tests.claiming import REMOTE, alone, rank
from tests.processes import ProcessGroup


def lead(told: int) -> None:
    claim = forebay.claim("/local", REMOTE, alone(), "job")
    os.dup(claim._members._fd)  # as in the moment between the fork and what is done after it
    child = os.fork()
    if child == 0:
        claim.close()
    else:
        os.write(told, b"%d" % child)
    signal.pause()


def test_a_child_that_dies_while_it_is_looked_at(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leader and child are killed together. The child was just forked: it has its leader's lock still, at the first look; at the second
    look, at who the members are, it is gone as well. That is no claim that somebody has."""
    heard, told = os.pipe()
    leader = os.fork()
    if leader == 0:
        try:
            lead(told)
        finally:
            os._exit(1)
    child = int(os.read(heard, 20))
    for fd in (heard, told):
        os.close(fd)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    (name,) = parse(os.listdir(registry))
    found = read_state(registry, *name)
    assert found is not None
    assert found.led
    members = ClaimState.members

    def later(self: ClaimState) -> list[Member]:
        os.kill(child, signal.SIGKILL)
        while (again := read_state(registry, *name)) is not None and again.live:
            os.sched_yield()
        return members(self)

    monkeypatch.setattr(ClaimState, "members", later)
    assert found.is_ending()


def test_names_of_claims_are_told_from_others() -> None:
    sound, tag = f"000001.{'a' * 16}", "b" * 16
    others = ["", "lock", f"1.{tag}", f".new.{tag}", f"000002.{tag}\n", f"x000003.{tag}", f"000004.{tag}x", f"\n000005.{tag}"]
    assert parse([*others, sound, *others, f"1000000.{tag}"]) == [(sound, 1, "a" * 16), (f"1000000.{tag}", 1_000_000, tag)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_who_can_open_nothing_takes_nobody_for_dead(
    registry: Path, monkeypatch: pytest.MonkeyPatch, children: ProcessGroup, number: int
) -> None:
    opened = os.open

    def fail(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if str(path).endswith("/claim") and not flags & os.O_RDWR:
            raise OSError(number, os.strerror(number), path)
        return opened(path, flags, *args, **how)

    def take() -> int | None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            try:
                forebay.claim("/local", REMOTE, alone(), "other")
            except OSError as error:
                return error.errno
        return None

    with forebay.claim("/local", REMOTE, alone(), "job"):
        assert children(take).result() == number
        with pytest.raises(errors.ClaimConflict):
            forebay.claim("/local", REMOTE, alone(), "other")


def test_a_forked_rank_is_one_process(registry: Path, children: ProcessGroup) -> None:
    def join() -> tuple[int, ...]:
        with forebay.claim("/local", REMOTE, rank(1, 2), "job"):
            (info,) = forebay.list_claims()
            return info.pids

    with forebay.claim("/local", REMOTE, rank(0, 2), "job"):
        child = children(join)
        assert child.result() == (os.getpid(), child.pid)


@pytest.mark.parametrize("step", ["mkdir", "chmod", "rename before", "rename after", "free"])
def test_a_directory_that_is_moved_while_its_claim_is_made(
    node: Registry, registry: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:  # fmt: skip
    """The owner of the registry may do that at any time."""
    if step == "free":
        registry.joinpath(f"000000.{'a' * 16}").mkdir()
        registry.joinpath(f"000000.{'a' * 16}", "claim").touch()
    call, when, _ = step.partition(" ") if step != "free" else ("rename", "before", "")
    real, moved = getattr(host, call), list[str]()

    def moving(*given: Any) -> None:
        def move() -> None:
            for name in os.listdir(registry):
                if name != "lock" and not name.endswith("~") and not moved:
                    moved.append(name)
                    os.rename(registry / name, registry / f"{name}~")

        if when.startswith("before"):
            move()
        real(*given)
        move()

    monkeypatch.setattr(host, call, moving)
    if step == "free":
        forebay.claim("/local", REMOTE, alone(), "job").close()
    else:
        with pytest.raises(errors.Closed):
            forebay.claim("/local", REMOTE, alone(), "job")
    assert moved
    shutil.rmtree(registry)


def test_a_directory_that_is_moved_in_the_middle_of_a_call(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.claim("/local", REMOTE, alone(), "job") as claim:
        lock = LockFile.try_lock

        def moving(self: LockFile, offset: int, *, exclusive: bool) -> bool:
            if claim.path.exists():
                claim.path.rename(f"{claim.path}~")
            return lock(self, offset, exclusive=exclusive)

        monkeypatch.setattr(LockFile, "try_lock", moving)
        with pytest.raises(errors.Closed, match=r"is lost: .* was removed"):
            claim.array("a", 3, "int64")
    shutil.rmtree(registry)


@pytest.mark.parametrize("used", [False, True])
def test_a_directory_that_somebody_removed_is_told(registry: Path, used: bool) -> None:
    with forebay.claim("/local", REMOTE, alone(), "job") as claim:
        if used:
            claim.scalar("used", "int64")
        shutil.rmtree(claim.path)
        with pytest.raises(errors.Closed, match=f"its directory {claim.path} was removed"):
            claim.array("a", 3, "int64")
