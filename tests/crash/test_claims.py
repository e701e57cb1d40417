"""A process dies before the k-th change of a file while it makes, joins, leaves or frees a claim: for every k. The next one is told
nothing of it: it has the same directory and the same number at once, and nothing is left of the dead."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy  # noqa: F401 (here, so that forked children need not)
import pytest

import forebay
import forebay.claims
import forebay.remote
from forebay import errors
from forebay._kernel import host
from forebay.adapters.streaming.names import create_linked
from forebay.claims import (
    records,
    shared,  # noqa: F401
)
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.processes import JobId
from forebay.claims.records import ClaimedStream, ExternalFiles
from forebay.claims.registry import Registry
from tests.claiming import REMOTE, alone, rank, registry  # noqa: F401 (a fixture)
from tests.processes import Child, Gate, death_of, fork, fork_to_die, in_child

MOST = 500
SOON = 20.0
"""Seconds that the next claim may take: a guard against waiting for the dead, on a busy machine."""


def every_step(during: Callable[[], object], after: Callable[[], object], least: int) -> list[str]:
    """Let ``during`` die at each of its steps in turn; each time a fresh process does ``after``. Gives the steps."""
    deaths: list[str] = []
    for step in itertools.count():
        assert step < MOST
        death = death_of(fork_to_die(step, during))
        if death is None:
            break
        deaths.append(death)
        try:
            in_child(after)
        except Exception as error:
            raise AssertionError(f"killed before step {step}, {death}: {error}") from error
    assert len(deaths) >= least, deaths
    return deaths


def every_step_beside(
    living: Callable[[Callable[[], None]], list[str]], during: Callable[[], object], after: Callable[[], object], least: int
) -> list[str]:
    """`every_step` while another process is in the middle of ``living``, at what it is given. Gives what that one found."""
    ready, done = Gate(), Gate()
    beside = fork(lambda: living(lambda: (ready.open(), done.wait())[1]))
    ready.wait()
    every_step(during, after, least)
    done.open()
    found: list[str] = beside.result()
    ready.close()
    done.close()
    return found


def left(place: Path) -> list[str]:
    """What is in the registry, its lock apart."""
    return sorted(set(os.listdir(place)) - {"lock"})


def claims_at_once(place: Path, local: Path) -> None:
    """The directory can be had, under the first number, and nothing is left behind it."""
    began = time.monotonic()
    with forebay.claim(local, REMOTE, alone(), timeout=0) as claim:
        assert time.monotonic() - began < SOON
        assert claim.prefix == 0
        assert left(place) == [claim.path.name]
        assert claim.array("steps", 3, "int64").tolist() == [0, 0, 0]
    assert left(place) == []


def dies_with_arrays(claim: forebay.Claim) -> None:
    claim.array("steps", 3, "int64")[:] = 7
    claim.buffer("text", 10_000)
    with claim.lock("once"):
        pass


def test_a_claim_that_is_made(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    Registry()
    deaths = every_step(lambda: forebay.claim(tmp_path, REMOTE, alone()), lambda: claims_at_once(registry, tmp_path), least=12)
    assert any(death.startswith("rename .new.") for death in deaths)


def test_a_registry_that_is_made(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    def anew() -> None:
        claims_at_once(registry, tmp_path)
        shutil.rmtree(registry)

    every_step(lambda: Registry(), anew, least=4)


def test_a_claim_that_is_given_back(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    def once() -> None:
        claim = forebay.claim(tmp_path, REMOTE, alone())
        dies_with_arrays(claim)
        claim.close()

    deaths = every_step(once, lambda: claims_at_once(registry, tmp_path), least=30)
    assert any(death.startswith("rmdir .old.") for death in deaths)


@pytest.mark.parametrize("how", ["prune", "claim"])
def test_what_a_dead_one_left_is_freed(registry: Path, tmp_path: Path, how: str) -> None:  # noqa: F811
    def leave_something() -> None:
        def dying() -> None:
            host.on_step(None)
            dies_with_arrays(forebay.claim(tmp_path, REMOTE, alone()))
            os.kill(os.getpid(), signal.SIGKILL)

        assert fork(dying).wait() == -signal.SIGKILL

    def once() -> None:
        leave_something()
        forebay.prune_claims() if how == "prune" else forebay.claim(tmp_path / "elsewhere", REMOTE, alone())

    every_step(once, lambda: claims_at_once(registry, tmp_path), least=8)


def test_a_rank_that_joins(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    """The leader goes on with what it has, whoever dies beside it."""

    def lead(stay: Callable[[], None]) -> list[str]:
        with forebay.claim(tmp_path, REMOTE, rank(0, 2), "job") as claim:
            stay()
            assert claim._members.live() == [member for member in claim._members.everyone() if member.slot == 0]
            return left(registry)

    def join() -> None:
        forebay.claim(tmp_path, REMOTE, rank(1, 2), "job", timeout=30)

    def joins() -> None:
        with forebay.claim(tmp_path, REMOTE, rank(1, 2), "job", timeout=30) as claim:
            assert claim.prefix == 0
            assert claim._members.is_in(0)

    assert len(every_step_beside(lead, join, joins, least=2)) == 1
    assert left(registry) == []


def test_a_claim_that_is_refused(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    def hold(stay: Callable[[], None]) -> list[str]:
        with forebay.claim(tmp_path, REMOTE, alone()):
            stay()
            with forebay.claim(tmp_path / "..", None, alone(), name="frees what is left"):
                return left(registry)

    def refused() -> None:
        with pytest.raises(errors.ClaimConflict):
            forebay.claim(tmp_path / "below", REMOTE, alone())

    assert len(every_step_beside(hold, refused, refused, least=5)) == 2
    assert left(registry) == []


class FilesBeside:
    """Files in another directory, as an adapter has them."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def check(self) -> None: ...

    def is_free(self, prefix: int) -> bool:
        return not any(os.path.lexists(name) for name in self._names(prefix))

    def files(self, prefix: int) -> ExternalFiles:
        marker, *others = self._names(prefix)
        return ExternalFiles(tuple(others), marker)

    def create_marker(self, prefix: int, directory: int) -> None:
        create_linked(self._names(prefix)[0], b"text", directory)

    def _names(self, prefix: int) -> Sequence[str]:
        return [str(self._place / f"{prefix}_{name}") for name in ("locals", "barrier", "lock")]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["linked", "copied to another file system"])
def test_what_is_beside_a_claim_goes_with_it(registry: Path, tmp_path: Path, elsewhere: bool) -> None:  # noqa: F811
    outside = tmp_path if elsewhere else registry.parent / "beside"
    outside.mkdir(exist_ok=True)

    def have() -> None:
        wanted = ClaimRequest(
            JobId("job", "job", "job="), "0", (ClaimedStream(records.canonical(tmp_path), REMOTE),), beside=FilesBeside(outside)
        )
        members = Registry().register(wanted, 0)
        assert members.record.prefix == 0
        assert (outside / "0_locals").read_bytes() == b"text"
        (outside / "0_barrier").touch()
        (outside / "mine").touch()
        members.leave()

    def has_at_once() -> None:
        have()
        assert sorted(os.listdir(outside)) == ["mine"]
        assert left(registry) == []

    deaths = every_step(have, has_at_once, least=20)
    assert any(death.startswith("link 0_locals") for death in deaths)


def test_a_child_forked_at_each_step_holds_nothing(registry: Path, tmp_path: Path) -> None:  # noqa: F811
    """Wherever a process is forked in the middle of a claim, and however it ends: the child is not in its way."""
    born: list[int] = []

    def fork_here(name: str, subject: str) -> None:
        pid = os.fork()
        if pid == 0:
            forked.open()
            os.read(stay._from, 1)
            os._exit(0)
        forked.wait()  # it has let go of what it inherited
        born.append(pid)

    def claim_and_die() -> None:
        host.on_step(fork_here)
        forebay.claim(tmp_path, REMOTE, alone())
        host.on_step(None)
        os.write(told, len(born).to_bytes(4, "little"))
        os.kill(os.getpid(), 9)

    stay, forked = Gate(), Gate()
    answer, told = os.pipe()
    child: Child = fork(claim_and_die)
    assert child._status is None
    count = int.from_bytes(os.read(answer, 4), "little")
    os.waitpid(child.pid, 0)
    assert count >= 12
    try:
        in_child(lambda: claims_at_once(registry, tmp_path))
    finally:
        for _ in range(count):
            stay.open()
        for fd in (answer, told):
            os.close(fd)
        stay.close()
        forked.close()
