"""The place of all claims: what is wrong with it is said in words."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._kernel import host, locks
from forebay.claims.registry import LOCK, Registry
from tests.claiming import REMOTE, alone, text_of
from tests.processes import Gate, ProcessGroup, as_user


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("put", [Path.mkdir, lambda path: path.symlink_to("/etc/hostname"), bind], ids=["directory", "link", "socket"])
def test_a_lock_that_is_no_file_is_told(node: Registry, registry: Path, put: Callable[[Path], object]) -> None:
    claim = forebay.claim("/local", REMOTE, alone())
    (registry / LOCK).unlink()
    put(registry / LOCK)
    with pytest.raises(errors.RootRefused, match=rf"{registry} .*'lock' in it cannot be opened"):
        forebay.claim("/other", REMOTE, alone())
    claim.close()  # it leaves the rest to the next claim
    assert not any(info.live for info in forebay.list_claims())
    (registry / LOCK).rmdir() if put is Path.mkdir else (registry / LOCK).unlink()


@pytest.mark.root
def test_a_lock_that_is_not_everybodys_is_told(node: Registry, registry: Path, children: ProcessGroup) -> None:
    (registry / LOCK).touch()
    (registry / LOCK).chmod(0o600)

    def claim() -> str:
        os.setuid(65534)
        with pytest.raises(errors.RootRefused) as caught:
            forebay.claim("/local", REMOTE, alone())
        return str(caught.value)

    assert "Permission denied" in children(claim).result()


def test_the_holder_of_the_lock_is_named_where_proc_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = tmp_path / "claims"
    monkeypatch.setattr(locks, "holders", lambda path, offset: ())
    with (
        Registry(registry).locked(5),
        pytest.raises(errors.WaitTimeout, match=rf"process {os.getpid()} on .* of user {os.geteuid()}"),
    ):
        with Registry(registry).locked(0.01):
            raise AssertionError


@pytest.mark.root
def test_who_locks_it_by_lockf_and_writes_nothing_is_named(node: Registry, registry: Path, children: ProcessGroup) -> None:
    ready = Gate()
    (registry / LOCK).touch()
    (registry / LOCK).chmod(0o666)

    def squat() -> None:
        with open(registry / LOCK, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            ready.open()
            signal.pause()

    squatter = children(as_user(65533, squat))
    ready.wait()

    def claim() -> str:
        return text_of(errors.WaitTimeout, lambda: forebay.claim("/local", REMOTE, alone(), timeout=0.01))

    assert f"process {squatter.pid} on" in children(as_user(65534, claim)).result()
    squatter.kill()


def test_a_full_file_system_keeps_nobody_from_looking(node: Registry) -> None:
    def full(call: str, subject: str) -> None:
        if call == "pwrite":
            raise OSError(errno.ENOSPC, "No space left on device")

    host.on_step(full)
    try:
        assert node.prune() == []
    finally:
        host.on_step(None)
