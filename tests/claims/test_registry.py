"""The registry of a node: who gets what, who waits for whom, and that no death, user, fork or foreign byte is in anybody's way."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

import forebay
import forebay.claims
import forebay.remote  # here, so that forked children need not
from forebay import errors
from forebay._kernel import host
from forebay.claims import claim_files, members, records
from forebay.claims import registry as registry_module
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.processes import JobId
from forebay.claims.records import ClaimedStream
from forebay.claims.registry import Registry
from tests.claiming import REMOTE, alone, claims_in, rank, text_of
from tests.processes import Child, Gate, ProcessGroup, as_user, fork, in_child

SOON = 20.0
"""A guard against waiting for the dead, on a busy machine."""
T = TypeVar("T")


def claim(local: object, remote: str | None = REMOTE, **how: Any) -> forebay.Claim:
    return forebay.claim(str(local), remote, how.pop("world", alone()), **how)


def held(children: ProcessGroup, local: object, remote: str | None = REMOTE, **how: Any) -> Child:
    """A process that has a claim until it is killed."""
    ready = Gate()

    def hold() -> None:
        members.leave_all()
        kept = claim(local, remote, **how)  # noqa: F841
        ready.open()
        signal.pause()

    child = children(hold)
    ready.wait()
    ready.close()
    return child


def at_once(children: ProcessGroup, works: Sequence[Callable[[Callable[[], None]], T]]) -> list[T]:
    """Let processes begin together; at what each is given, it waits until all have come there."""
    begin, come, done = Gate(), Gate(), Gate()

    def one(work: Callable[[Callable[[], None]], T]) -> T:
        begin.wait()
        return work(lambda: (come.open(), done.wait())[1])

    born = [children(lambda work=work: one(work)) for work in works]
    for _ in born:
        begin.open()
    for _ in born:
        come.wait()
    for _ in born:
        done.open()
    found = [child.result() for child in born]
    for gate in (begin, come, done):
        gate.close()
    return found


# -- the directory of the registry -------------------------------------------------------------------------------------


def test_the_registry_is_open_to_all_whatever_the_umask(registry: Path) -> None:
    before = os.umask(0o077)
    try:
        with claim("/local") as found:
            assert stat.S_IMODE(registry.stat().st_mode) == 0o1777
            assert stat.S_IMODE((registry / "lock").stat().st_mode) == 0o666
            assert stat.S_IMODE(found.path.stat().st_mode) == 0o755
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found.path.iterdir()}
            assert modes == {"claim": 0o644, "members": 0o600, "locks": 0o600, "words": 0o600}
    finally:
        os.umask(before)


def test_a_registry_without_the_sticky_bit_gets_it(registry: Path) -> None:
    registry.mkdir()
    registry.chmod(0o777)
    Registry()
    assert stat.S_IMODE(registry.stat().st_mode) == 0o1777


def test_a_registry_of_a_group_keeps_its_mode(registry: Path) -> None:
    registry.mkdir(0o770)
    registry.chmod(0o770)
    claim("/local").close()
    assert stat.S_IMODE(registry.stat().st_mode) == 0o770


def test_the_registry_creates_its_parent_directories(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(registry / "deep" / "er"))
    claim("/local").close()
    assert (registry / "deep" / "er" / "lock").exists()


def test_a_network_file_system_is_refused(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(host, "fs_kind", lambda path: "nfs")
        said = text_of(errors.RootRefused, lambda: claim("/local"))
    assert "nfs" in said
    assert "FOREBAY_CLAIMS" in said


@pytest.mark.root
@pytest.mark.parametrize(("options", "said"), [("size=64k", "bytes"), ("nr_inodes=5", "inodes")])
def test_a_full_one_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", full], capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        monkeypatch.setenv("FOREBAY_CLAIMS", str(full / "claims"))
        with pytest.raises(errors.NoSpace) as raised:
            claim("/local")
        assert said in str(raised.value)
        assert os.listdir(full / "claims") == ["lock"]  # what was begun is gone
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.parametrize("said", ["relative/place", "./here"])
def test_a_relative_one_is_an_error(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", said)
    assert "absolute" in text_of(errors.ConfigError, lambda: claim("/local"))


def test_by_default_it_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry_module.default() == Path("/dev/shm/forebay-claims")


def test_64_processes_make_it_at_once(registry: Path, children: ProcessGroup) -> None:
    go = Gate()
    born = [children(lambda: (go.wait(), Registry().path)) for _ in range(64)]
    for _ in born:
        go.open()
    assert {child.result()[1] for child in born} == {registry}
    assert sorted(os.listdir(registry)) == ["lock"]
    assert os.listdir(registry.parent) == ["claims"]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_each_gets_the_lowest_number_that_is_free(node: Registry, children: ProcessGroup) -> None:
    born = [held(children, f"/local/{n}") for n in range(4)]
    with claim("/local/mine") as fourth:
        assert fourth.prefix == 4
    born[1].kill()
    born[2].kill()
    with claim("/local/mine") as first, claim("/local/other") as second:
        assert (first.prefix, second.prefix) == (1, 2)
        assert [seen.prefix for seen in node.states()] == [0, 1, 2, 3]


def test_a_claim_says_what_it_is(node: Registry, tmp_path: Path) -> None:
    with forebay.claim([tmp_path / "a", tmp_path / "b"], ["s3://me:hush@bucket/a?token=hush", None], alone(), "mine", name="eval") as found:
        assert (found.job, found.name, found.is_leader, found.closed) == ("mine", "eval", True, False)
        assert found.directories == (str(tmp_path / "a"), str(tmp_path / "b"))
        assert found.remotes == (forebay.remote.canonical("s3://me:hush@bucket/a?token=hush"), None)
        assert "hush" not in str(found.remotes)
        assert repr(found) == f"<forebay.Claim 000000 of {tmp_path}/a, {tmp_path}/b>"
        (info,) = forebay.list_claims()
        assert (info.prefix, info.job, info.name, info.pids, info.leader) == (0, "mine", "eval", (os.getpid(),), os.getpid())
        assert (info.directories, info.remotes, info.live, info.bytes) == (found.directories, found.remotes, True, 0)
        assert info.uid == os.geteuid()
        assert 0 <= info.age < 60
        assert "python" in info.command
        found.buffer("some", 1 << 20)
        assert (forebay.list_claims()[0].bytes or 0) >= 1 << 20
    assert found.closed
    assert "closed" in repr(found)
    assert forebay.list_claims() == []


def test_a_cache_claims_for_the_node(node: Registry, tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=1 << 20, min_free=0) as cache, cache.claim("/local", REMOTE, alone(), name="a") as found:
        with pytest.raises(errors.ClaimConflict):
            claim("/local/x")
        assert found.name == "a"
    with pytest.raises(errors.Closed):
        cache.claim("/local")


def test_a_claim_without_directories(node: Registry) -> None:
    with forebay.claim([]) as found, forebay.claim([]) as other:
        assert (found.directories, other.prefix) == ((), 1)


# -- conflicts ---------------------------------------------------------------------------------------------------------


def test_the_error_has_both_claims_as_values(node: Registry, children: ProcessGroup) -> None:
    other = held(children, "/local/data", job="theirs")
    with pytest.raises(errors.ClaimConflict) as raised:
        claim("/local", "s3://b/x", job="mine")
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.theirs["pids"] == [other.pid]
    assert again.ours["pids"] == [os.getpid()]
    assert (again.ours["job"], again.theirs["job"]) == ("mine", "theirs")
    assert (again.ours["directories"], again.theirs["directories"]) == (["/local"], ["/local/data"])
    assert json.dumps(again.facts)


def test_nothing_was_claimed_then(node: Registry, children: ProcessGroup) -> None:
    held(children, "/local/data")
    with pytest.raises(errors.ClaimConflict):
        forebay.claim(["/local/free", "/local/data"], [REMOTE, REMOTE], alone())
    claim("/local/free", job="next").close()


def test_where_nothing_is_fetched_sharing_is_fine(node: Registry, children: ProcessGroup) -> None:
    held(children, "/local/data")
    with claim("/local/data", None) as same, claim("/local", None) as above:
        assert same.path.is_dir()
        assert above.path.is_dir()


def test_a_directory_that_was_removed_and_its_number_given_away_is_no_conflict(
    node: Registry, tmp_path: Path, children: ProcessGroup
) -> None:
    """Inode numbers are used again: what lives under another name by now is another directory."""
    first = tmp_path / "first"
    first.mkdir()
    held(children, first)
    theirs = node.states()[0]
    assert theirs.record is not None
    first.rmdir()
    second = tmp_path / "second"
    second.mkdir()
    stream = theirs.record.streams[0]
    same_number = stream.directory._replace(levels=(*stream.directory.levels[:-1], records.canonical(second).levels[-1]))
    record = theirs.record._replace(streams=(ClaimedStream(same_number, REMOTE),))
    (theirs.directory / "claim").write_bytes(record.dump())
    with claim(second):
        pass
    assert "first" in text_of(errors.ClaimConflict, lambda: claim(first))


def test_who_says_to_lead_twice_is_told_about_ranks(node: Registry, children: ProcessGroup) -> None:
    held(children, "/local/a", world=rank(0, 2), job="job")
    said = text_of(errors.ClaimConflict, lambda: claim("/local/b", world=rank(0, 2), job="job"))
    assert "world=" in said


def test_the_other_ranks_are_told_of_a_conflict_at_once(node: Registry, children: ProcessGroup) -> None:
    held(children, "/local")
    began = time.monotonic()

    def refused(number: int) -> tuple[str, dict[str, Any]]:
        with pytest.raises(errors.ClaimConflict) as raised:
            claim("/local", world=rank(number, 2), job="job", timeout=60)
        return str(raised.value), raised.value.facts

    follower = children(lambda: refused(1))
    assert refused(0) == follower.result()
    assert time.monotonic() - began < SOON


def test_a_refusal_is_withdrawn_at_the_end_and_there_are_few(node: Registry, children: ProcessGroup, registry: Path) -> None:
    held(children, "/local")

    def refused() -> list[str]:
        for _ in range(40):
            with pytest.raises(errors.ClaimConflict):
                claim("/local/x", job="job")
        found = os.listdir(registry)
        members.leave_all()
        return [name for name in found if name.startswith(registry_module.REFUSED)]

    assert len(in_child(refused)) == 32
    assert [name for name in os.listdir(registry) if name.startswith(registry_module.REFUSED)] == []


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["at once", "after a while"])
def test_a_killed_leader_is_waited_for_until_the_last_of_it_is_gone(node: Registry, children: ProcessGroup, pause: float) -> None:
    """The new job begins while a rank of the old one still ends."""
    leader = held(children, "/local", world=rank(0, 2), job="job")
    follower = held(children, "/local", world=rank(1, 2), job="job")
    leader.kill()
    killing = threading.Timer(pause, follower.kill)
    killing.start()
    began = time.monotonic()
    with claim("/local", world=rank(0, 2), job="job") as found:
        assert pause <= time.monotonic() - began + 0.1 < pause + SOON
        assert found.prefix == 0
    killing.join()


@pytest.mark.rotates
def test_what_does_not_end_in_time_is_a_conflict(node: Registry, children: ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    leader = held(children, "/local", world=rank(0, 2), job="job")
    follower = held(children, "/local", world=rank(1, 2), job="job")
    leader.kill()
    with caplog.at_level(logging.WARNING, "forebay.wait"):
        said = text_of(errors.ClaimConflict, lambda: claim("/local", timeout=7, job="next"))
    assert str(follower.pid) in said
    assert any(str(follower.pid) in record.getMessage() for record in caplog.records)


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["leader first", "leader last"])
def test_ranks_find_their_leader(node: Registry, children: ProcessGroup, order: str) -> None:
    def one(number: int) -> tuple[int, int, bool]:
        with claim("/local", world=rank(number, 4), job="job") as found:
            found.barrier("all").wait(4)
            return found.prefix, len(found._members.live()), found.is_leader

    numbers = [0, 1, 2, 3] if order == "leader first" else [3, 2, 1, 0]
    born = {}
    for number in numbers:
        born[number] = children(lambda number=number: one(number))
        time.sleep(0.05 if number != numbers[-1] else 0)  # no order is forced by it: each is right
    found = {number: child.result() for number, child in born.items()}
    assert {prefix for prefix, _, _ in found.values()} == {0}
    assert [found[number][2] for number in range(4)] == [True, False, False, False]


def test_the_second_claim_of_a_rank_is_the_second_of_its_leader(node: Registry, children: ProcessGroup) -> None:
    def both(number: int) -> list[tuple[int, tuple[str, ...]]]:
        with claim("/local/a", world=rank(number, 2), job="job") as one, claim("/local/b", world=rank(number, 2), job="job") as other:
            one.barrier("end").wait(2)
            return [(one.prefix, one.directories), (other.prefix, other.directories)]

    born = [children(lambda number=number: both(number)) for number in range(2)]
    assert born[0].result() == born[1].result() == [(0, ("/local/a",)), (1, ("/local/b",))]


def test_named_claims_are_found_in_any_order(node: Registry, children: ProcessGroup) -> None:
    def both(number: int, names: tuple[str, str]) -> dict[str, int]:
        found = {name: claim(f"/local/{name}", world=rank(number, 2), job="job", name=name) for name in names}
        found["train"].barrier("end").wait(2)
        return {name: one.prefix for name, one in found.items()}

    leader = children(lambda: both(0, ("train", "eval")))
    follower = children(lambda: both(1, ("eval", "train")))
    assert leader.result() == follower.result()


def test_a_failed_call_counts(node: Registry, children: ProcessGroup) -> None:
    """Else the next call of who failed would meet an earlier one of the others."""
    held(children, "/taken")

    def lead() -> int:
        with pytest.raises(errors.ClaimConflict):
            claim("/taken", world=rank(0, 2), job="job")
        with claim("/local", world=rank(0, 2), job="job") as found:
            found.barrier("end").wait(2)
            return found.prefix

    def follow() -> int:
        with pytest.raises((errors.ClaimConflict, errors.ClaimMismatch)):
            claim("/taken", world=rank(1, 2), job="job")
        with claim("/local", world=rank(1, 2), job="job") as found:
            found.barrier("end").wait(2)
            return found.prefix

    leader, follower = children(lead), children(follow)
    assert leader.result() == follower.result() == 1


@pytest.mark.parametrize(
    ("ours", "remotes", "shared", "said"),
    [
        (["/local/other"], [REMOTE], False, "/local/other here, /local/data there"),
        (["/local/data"], ["s3://bucket/other"], False, "s3://bucket/other here"),
        (["/local/data", "/local/more"], [REMOTE, None], False, "2 directories here, 1 there"),
        (["/local/data"], [REMOTE], True, "shared=True here, shared=False there"),
    ],
)
def test_a_rank_that_says_something_else_is_told_what(
    node: Registry, children: ProcessGroup, ours: list[str], remotes: list[str | None], shared: bool, said: str
) -> None:  # fmt: skip
    held(children, "/local/data", world=rank(0, 2), job="job")
    with pytest.raises(errors.ClaimMismatch) as raised:
        forebay.claim(ours, remotes, rank(1, 2), "job", shared=shared)
    assert said in str(raised.value)
    assert isinstance(raised.value, RuntimeError)


def test_a_rank_says_whom_it_waits_for(node: Registry) -> None:
    with pytest.raises(errors.WaitTimeout) as raised:
        claim("/local", world=rank(1, 2), job="job", timeout=0.1)
    for word in ("job job", "job=", "first rank"):
        assert word in str(raised.value)


def test_the_claim_of_a_leader_that_is_gone_is_not_joined(node: Registry, children: ProcessGroup) -> None:
    leader = held(children, "/local", world=rank(0, 3), job="job")
    held(children, "/local", world=rank(1, 3), job="job")
    leader.kill()
    with pytest.raises(errors.WaitTimeout):
        claim("/local", world=rank(2, 3), job="job", timeout=0.2)


def test_whoever_comes_first_makes_what_nobody_leads(node: Registry, children: ProcessGroup) -> None:
    def one(meet: Callable[[], None]) -> tuple[int, int]:
        found = Registry().join_or_register(ClaimRequest(JobId("any", "any", "by name"), "name", ()))
        meet()
        return found.record.prefix, found.record.pid

    assert len(set(at_once(children, [one] * 6))) == 1


def test_64_processes_of_8_jobs_at_once(node: Registry, children: ProcessGroup, registry: Path) -> None:
    def one(job: int, number: int, meet: Callable[[], None]) -> tuple[int, int, int]:
        with claim(f"/local/{job}", world=rank(number, 8), job=f"job {job}") as found:
            found.barrier("all").wait(8, 60)
            count = len(found._members.live())
            meet()
            return job, found.prefix, count

    found = at_once(children, [functools.partial(one, job, number) for job in range(8) for number in range(8)])
    prefixes = {job: {prefix for of, prefix, _ in found if of == job} for job in range(8)}
    assert sorted(prefix for (prefix,) in prefixes.values()) == list(range(8))
    assert {count for _, _, count in found} == {8}
    claim("/last").close()
    assert claims_in(registry) == []


# -- fork, pickle, threads ---------------------------------------------------------------------------------------------


def test_a_child_has_the_claim_and_keeps_it(node: Registry, registry: Path) -> None:
    found = claim("/local")
    ready, done = Gate(), Gate()
    child = fork(lambda: (ready.open(), done.wait(), found.closed, found.close()))
    ready.wait()
    found.close()
    assert "overlaps" in text_of(errors.ClaimConflict, lambda: claim("/local/x", timeout=0))
    done.open()
    assert child.result()[2] is False
    assert claims_in(registry) == []


def test_a_pickle_is_the_claim_of_the_process(node: Registry) -> None:
    with claim("/local") as found:
        assert pickle.loads(pickle.dumps(found)) is found
        data = pickle.dumps(found)
    with pytest.raises(errors.Closed):
        pickle.dumps(found)
    with pytest.raises(errors.Closed):
        pickle.loads(data)


def test_a_pickle_joins_in_another_process(node: Registry, children: ProcessGroup) -> None:
    ours, its = socket.socketpair()

    def other() -> tuple[bool, list[str]]:
        arrived = pickle.loads(its.recv(1 << 16))
        again = pickle.loads(pickle.dumps(arrived))
        its.send(b".")
        its.recv(1)
        arrived.close()
        return again is arrived, list(arrived.directories)

    child = children(other)  # before the claim: it inherits nothing
    with claim("/local") as found:
        ours.send(pickle.dumps(found))
        ours.recv(1)
        assert [member.pid for member in found._members.live()] == [os.getpid(), child.pid]
        ours.send(b".")
        assert child.result() == (True, ["/local"])
        assert len(found._members.live()) == 1


def test_a_pickle_of_a_freed_claim_is_not_that_of_its_successor(node: Registry) -> None:
    with claim("/local", job="job", name="same") as found:
        data = pickle.dumps(found)
    with claim("/local", job="job", name="same") as successor:
        assert successor.path == found.path
        assert "freed" in text_of(errors.Closed, lambda: pickle.loads(data))
        assert len(successor._members.live()) == 1


def test_dropping_it_frees_nothing(node: Registry) -> None:
    claim("/local")
    with pytest.raises(errors.ClaimConflict):
        claim("/local/x")
    members.leave_all()
    claim("/local/x").close()


def test_a_finalizer_may_let_go(node: Registry, registry: Path) -> None:
    found = claim("/local")
    found.let_go()
    found.let_go()
    assert found.closed
    assert claims_in(registry) == []


def test_threads_that_unpickle_one_get_one(node: Registry, children: ProcessGroup) -> None:
    ours, its = socket.socketpair()

    def other() -> int:
        data = its.recv(1 << 16)
        arrived: list[forebay.Claim] = []
        threads = [threading.Thread(target=lambda: arrived.append(pickle.loads(data))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(arrived[0]._members.live()) == 2
        return len(set(map(id, arrived)))

    child = children(other)
    with claim("/local") as found:
        ours.send(pickle.dumps(found))
        assert child.result() == 1


def test_threads_get_claims_of_their_own(node: Registry) -> None:
    found: list[forebay.Claim] = []
    threads = [threading.Thread(target=lambda n=n: found.append(claim(f"/local/{n}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.prefix for one in found) == list(range(8))
    for one in found:
        one.close()


def test_forks_in_the_middle_of_claims(node: Registry, registry: Path) -> None:
    """One thread claims and gives back, another forks. A child has the claims that its parent had; the registry's lock it never has."""

    def busy() -> list[int]:
        born: list[int] = []
        over = threading.Event()

        def fork_on() -> None:
            while not over.is_set():
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                born.append(pid)
                time.sleep(0.001)

        thread = threading.Thread(target=fork_on)
        thread.start()
        for n in range(60):
            claim(f"/local/{n}").close()
        over.set()
        thread.join()
        os.write(told, pickle.dumps(born))
        os.kill(os.getpid(), signal.SIGKILL)
        return born

    heard, told = os.pipe()
    child = fork(busy)
    born: list[int] = pickle.loads(os.read(heard, 1 << 16))
    child.wait() if child._status is not None else os.waitpid(child.pid, 0)
    try:
        assert len(born) > 5
        with claim("/elsewhere", timeout=30) as found:
            assert found.prefix <= len(born)
    finally:
        for pid in born:
            os.kill(pid, signal.SIGKILL)
        os.close(heard)
        os.close(told)


def test_closed_descriptors_cost_nothing(node: Registry, caplog: pytest.LogCaptureFixture) -> None:
    def careless() -> tuple[int, int]:
        found = claim("/local")
        os.closerange(3, 4096)
        os.open("/dev/null", os.O_RDONLY)
        found.buffer("a", 8)
        with found.lock("l"):
            pass
        second = claim("/local/other", None)
        return found.prefix, second.prefix

    answer, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        result = careless()  # closes the pipe too: the exit status tells
        os._exit(0 if result == (0, 1) else 1)
    os.close(told)
    os.close(answer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- the lock of the registry ------------------------------------------------------------------------------------------


def test_a_lock_that_does_not_come_is_told(node: Registry, registry: Path, children: ProcessGroup) -> None:
    ready = Gate()

    def hold() -> None:
        with node.locked():
            ready.open()
            signal.pause()

    child = children(hold)
    ready.wait()
    said = text_of(errors.WaitTimeout, lambda: claim("/local", timeout=0.2))
    assert str(child.pid) in said
    child.stop()
    child.kill()
    claim("/local", timeout=30).close()


def test_closing_does_not_wait_for_it(node: Registry, registry: Path) -> None:
    found = claim("/local")
    with node.locked():
        found.close()
        assert claims_in(registry) == [found.path.name]
    claim("/last").close()
    assert claims_in(registry) == []


# -- what others put there ---------------------------------------------------------------------------------------------


def test_foreign_things_stop_nobody(node: Registry, registry: Path) -> None:
    (registry / "000000.0123456789abcdef").mkdir()
    os.mkfifo(registry / "000000.0123456789abcdef" / "claim")
    (registry / "000001.0123456789abcdef").write_text("a file")
    (registry / ".old.link").symlink_to("/")
    (registry / ".new.file").write_text("mine")
    (registry / "refused.").mkdir()
    (registry / "99999999999999999999.0123456789abcdef").mkdir()
    began = time.monotonic()
    with claim("/local") as found:
        assert found.prefix == 1
        assert forebay.list_claims()
    assert time.monotonic() - began < SOON
    assert os.path.lexists(registry / ".old.link")
    assert (registry / ".new.file").read_text() == "mine"
    for name in (".old.link", ".new.file", "000001.0123456789abcdef", "000000.0123456789abcdef/claim"):
        (registry / name).unlink()
    (registry / "000000.0123456789abcdef").rmdir()


def test_what_cannot_be_removed_is_told_once(
    node: Registry, registry: Path, children: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    child = held(children, "/local")
    (path,) = claims_in(registry)
    (registry / path / "a directory").mkdir()
    (registry / path / "a directory" / "file").touch()
    child.kill()
    with caplog.at_level(logging.WARNING, "forebay.claims"):
        for _ in range(3):
            with claim("/local") as found:
                assert found.prefix == 0
    assert len(caplog.records) == 1
    (left,) = claims_in(registry)
    assert os.listdir(registry / left) == ["a directory"]
    (registry / left / "a directory" / "file").unlink()
    (registry / left / "a directory").rmdir()


def test_a_live_claim_that_was_damaged_keeps_its_number(node: Registry, registry: Path, children: ProcessGroup) -> None:
    held(children, "/local")
    (path,) = claims_in(registry)
    (registry / path / "claim").write_bytes(b"noise")
    with claim("/local") as found:
        assert found.prefix == 1
        (damaged, _) = forebay.list_claims()
        assert (damaged.prefix, damaged.live, damaged.job, damaged.directories) == (0, True, "", ())
    assert forebay.prune_claims() == []


def test_a_registry_that_was_removed_is_made_anew(node: Registry, registry: Path) -> None:
    found = claim("/local")
    subprocess.run(["rm", "-r", registry], check=True)
    with claim("/local", name="other") as again:
        assert again.prefix == 0
    found.close()


# -- users -------------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_the_dead_of_another_user_stay_and_are_in_nobodys_way(node: Registry, registry: Path, children: ProcessGroup) -> None:
    ready = Gate()
    child = children(as_user(65534, lambda: (claim("/local"), ready.open(), signal.pause())))
    ready.wait()
    child.kill()
    with claim("/local") as found:
        assert found.prefix == 1  # what it left under its number is still there
    assert [seen.uid for seen in node.states()] == [65534]
    assert forebay.prune_claims() == []
    assert [info.prefix for info in in_child(as_user(65534, forebay.prune_claims))] == [0]
    assert node.states() == []


@pytest.mark.root
def test_two_users_do_not_meet_under_one_name(node: Registry, children: ProcessGroup) -> None:
    """A name of a job is its user's."""
    ready = Gate()
    children(as_user(65534, lambda: (claim("/theirs", world=rank(0, 2), job="job"), ready.open(), signal.pause())))
    ready.wait()
    with pytest.raises(errors.WaitTimeout):
        claim("/theirs", world=rank(1, 2), job="job", timeout=0.1)
    (info,) = forebay.list_claims()
    assert (info.uid, len(info.pids)) == (65534, 1)
    children.kill()
    in_child(as_user(65534, forebay.prune_claims))


@pytest.mark.root
def test_a_claim_that_another_user_planted_is_not_joined(node: Registry, registry: Path, children: ProcessGroup) -> None:
    """He could cut its files short, which kills the process that has them mapped."""
    attacker, victim = 65533, 65534
    ready, tag = Gate(), in_child(as_user(victim, lambda: ClaimRequest(JobId("job", "job", "job="), "0", ()).tag))

    def plant() -> None:
        kept = claim("/theirs", world=rank(0, 2), job="job")  # noqa: F841
        (own,) = claims_in(registry)
        for path in (registry / own).iterdir():
            path.chmod(0o666)
        (registry / own).rename(registry / f"000000.{tag}")
        ready.open()
        signal.pause()

    children(as_user(attacker, plant))
    ready.wait()
    planted = registry / f"000000.{tag}"

    def join() -> str:
        assert node.states()[0].tag == ClaimRequest(JobId("job", "job", "job="), "0", ()).tag
        assert node.states()[0].members() == []
        for work in (lambda: members.Members.attach(planted), lambda: members.MemberTable(planted)):
            with pytest.raises(claim_files.Gone):
                work()
        return text_of(errors.WaitTimeout, lambda: claim("/theirs", world=rank(1, 2), job="job", timeout=0.1))

    assert "nobody yet" in children(as_user(victim, join)).result()
    children.kill()
    in_child(as_user(attacker, forebay.prune_claims))


@pytest.mark.root
@pytest.mark.parametrize("name", ["claim", "members", "locks", "words"])
def test_a_file_of_another_users_in_a_claim_is_not_opened(node: Registry, registry: Path, name: str) -> None:
    with claim("/local") as found:
        (directory,) = registry.glob("0*")
        path = directory / name
        path.chmod(0o666)
        os.chown(path, 65534, 65534)
        with pytest.raises(claim_files.Gone):
            claim_files.open_write(path)
        if name in ("locks", "words"):
            with pytest.raises((errors.Closed, claim_files.Gone)), found.lock("a"):
                raise AssertionError
        elif name == "members":
            with pytest.raises(claim_files.Gone):
                members.MemberTable(directory)
        else:
            with pytest.raises(claim_files.Gone):
                members.Members.attach(directory)
        os.chown(path, 0, 0)


def test_a_link_in_the_place_of_a_claim_that_is_made_is_not_followed(node: Registry, registry: Path, tmp_path: Path) -> None:
    """The owner of the registry can put one there at any moment: nothing is made where it leads."""
    home, kept = tmp_path / "home", registry / "kept"
    for at in itertools.count():
        home.mkdir(exist_ok=True)
        steps = itertools.count()

        def swap(call: str, subject: str) -> None:
            new = next((path for path in registry.glob(".new.*") if not path.is_symlink()), None)
            if new is not None and not kept.exists() and next(steps) == at:  # noqa: B023
                new.rename(kept)
                new.symlink_to(home)

        host.on_step(swap)
        try:
            claim("/local", job=f"job {at}").close()
        except (OSError, errors.ForebayError):
            pass
        finally:
            host.on_step(None)
        assert list(home.iterdir()) == []
        if not kept.exists():
            break
        shutil.rmtree(kept)
        for path in registry.iterdir():
            if path.is_symlink():
                path.unlink()
    assert at > 8


@pytest.mark.root
def test_the_lock_is_everybodys(node: Registry, registry: Path) -> None:
    assert in_child(as_user(65534, lambda: claim("/a").close())) is None
    (registry / "lock").unlink()
    assert in_child(as_user(65533, lambda: claim("/a").close())) is None
    claim("/a").close()


# -- PID namespaces ----------------------------------------------------------------------------------------------------

ELSEWHERE = """
import os, sys, forebay
claim = forebay.claim(sys.argv[1], "s3://b/k", forebay.World(1, 1, 1, 0), "elsewhere")
print(os.getpid(), claim.prefix, flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_a_process_of_another_pid_namespace_is_as_any_other(node: Registry, registry: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", ELSEWHERE, "/local"]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    line = started.stdout.readline()
    if not line:
        pytest.skip(f"no namespaces here: {started.communicate()[1]}")
    assert line.split() == ["1", "0"]  # number 1 there is another process here
    with pytest.raises(errors.ClaimConflict):
        claim("/local/x", timeout=0)
    (seen,) = node.states()
    assert not seen.is_ending()
    assert "another PID namespace" in seen.members()[0].describe()
    started.kill()
    started.communicate()
    with claim("/local/x", timeout=10) as found:
        assert found.prefix == 0


# -- speed -------------------------------------------------------------------------------------------------------------


def test_a_claim_does_not_get_slower_with_the_jobs_of_others(node: Registry, children: ProcessGroup) -> None:
    """Of the processor, so that other work on the machine counts little. It is 0.7 ms, and 12 us for each live one."""

    def cost() -> float:
        took = []
        for n in range(30):
            began = time.process_time()
            found = claim(f"/mine/{n}")
            took.append(time.process_time() - began)
            found.close()
        return sorted(took)[len(took) // 2]

    cost()
    alone_here = cost()
    for n in range(9):
        held(children, f"/theirs/{n}")
    assert cost() < 0.003  # a promise
    assert cost() < alone_here + 0.002


def test_a_conflict_is_felt_by_marks_alone(node: Registry, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not concern us is not read."""
    held(children, "/theirs")
    read: list[bytes] = []
    real = records.load
    monkeypatch.setattr(records, "load", lambda data: read.append(data) or real(data))
    found = claim("/mine")
    assert read == []
    found.close()
    with pytest.raises(errors.ClaimConflict):
        claim("/theirs/deep")
    assert read != []


def test_who_waits_for_the_first_rank_outlives_the_registry(node: Registry, registry: Path) -> None:
    """The directory is deleted while it waits, and made anew by the first rank."""
    request = ClaimRequest(JobId("job", "job", "job="), "0", ())
    shutil.rmtree(registry)
    with pytest.raises(errors.WaitTimeout, match=r"claims of this job here: none"):
        node.join(request, timeout=0.2)
