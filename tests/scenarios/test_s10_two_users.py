"""Scenario 10: a second user of the machine: by default nothing is shared, in a group's root everything is."""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import processes
from tests.items import until

pytestmark = pytest.mark.root
MiB = 1 << 20
(A, B), GROUP = processes.USERS, processes.COMMON_GROUP


as_user = functools.partial(processes.as_user, gid=GROUP)
"""As a user whose first group is the common one."""


def kill_midway(child: Any, server: ScriptedServer, root: Path) -> None:
    """Kill a child whose fetch of 12 MiB stalls, once a quarter of its chunks is noted on the disk; let the server go on."""
    assert server.stalled.wait(60)
    until(lambda: any(path.read_bytes()[512:524].count(1) >= 3 for path in (root / "tmp").glob("*.map")))
    child.kill()
    server.objects["/x.bin"].stall_after = None
    server.go.set()


@pytest.mark.parametrize("by", ["scratch", "home"])
def test_s10_by_default_nothing_is_shared(
    scratch: Path, public: Path, server: ScriptedServer, children: Callable[..., Any], by: str
) -> None:
    url = server.put("/x.bin", b"data" * 10_000)
    one = 100_000 + 2 * os.getpid()
    other = one + 1  # no other test is these two users: what they left in /dev/shm is of this one

    def script() -> str:
        home = public / f"home-{os.getuid()}"
        os.environ |= {"HOME": str(home), "TMPDIR": str(scratch)}
        os.environ.pop("XDG_CACHE_HOME", None)
        with forebay.Cache(scratch if by == "scratch" else None) as cache:
            assert cache.read(url) == b"data" * 10_000
            cache.put("key", b"value")
            assert cache.stats().hits == 0
            for path in [cache.path, *cache.path.rglob("*")]:
                status = path.lstat()
                assert status.st_uid == os.getuid()
            assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
            return str(cache.path)

    for uid in (one, other):
        (public / f"home-{uid}").mkdir()
        os.chown(public / f"home-{uid}", uid, GROUP)
    first = children(as_user(one, script)).result()
    second = children(as_user(other, script)).result()
    assert first != second
    if by == "scratch":
        assert (first, second) == (f"{scratch}/forebay-{one}", f"{scratch}/forebay-{other}")
    assert not any(path.lstat().st_uid in (one, other) for path in Path("/dev/shm").iterdir())
    assert server.gets == 2


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_s10_a_groups_root(project: Path, server: ScriptedServer, children: Callable[..., Any], umask: int) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(50_000 if i else 2 * MiB)) for i in range(6)]

    def first() -> None:
        with forebay.Cache(project / "root", shared=True, budget=8 << 20) as cache:
            for url in urls[:3]:
                cache.read(url)
            cache.put("key", b"value")
            cache.put("large", bytes(100_000))

    def second() -> None:
        with forebay.Cache(project / "root", shared=True) as cache:
            for url in urls[:3]:
                cache.read(url)
            assert cache.stats().hits == 3
            assert cache.get("key") == b"value"
            assert cache.get("large") == bytes(100_000)
            for url in urls[3:]:
                cache.read(url)
            assert cache.evict(urls[0]).removed == (urls[0],)  # the other's
            cache.put("key", b"mine now")
            cache.pin(urls[1])
            assert cache.check(deep=True) == []

    def third() -> None:
        with forebay.Cache(project / "root", shared=True) as cache:
            assert cache.get("key") == b"mine now"
            assert cache.evict(urls[5]).removed == (urls[5],)
            for i in range(12):
                assert cache.put(str(i), os.urandom(MiB))
            assert cache.check(deep=True) == []

    children(as_user(A, first, umask=umask)).result()
    gets = server.gets
    children(as_user(B, second, umask=umask)).result()
    assert server.gets == gets + 3
    children(as_user(A, third, umask=umask)).result()
    root = project / "root"
    assert stat.S_IMODE(root.stat().st_mode) == 0o2770
    for path in root.rglob("*"):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        assert status.st_gid == GROUP, path
        assert mode & 0o007 == 0 or "blobs" in path.parts or path.name == "CACHEDIR.TAG", (path, oct(mode))
        if path.is_dir():
            assert mode & 0o070 == 0o070, (path, oct(mode))
        elif "blobs" in path.parts:
            assert mode & 0o040, (path, oct(mode))
        else:
            assert mode & 0o060 == 0o060, (path, oct(mode))


def test_s10_one_waits_for_the_other(project: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    body = os.urandom(3 * MiB)
    url = server.put("/x.bin", body, stall_after=MiB, stalls=1)

    def read() -> bytes:
        with forebay.Cache(project / "root", shared=True) as cache:
            return bytes(cache.read(url))

    def waited() -> str:
        with forebay.Cache(project / "root", shared=True) as cache, pytest.raises(forebay.errors.WaitTimeout) as caught:
            cache.local(url, timeout=0.3)
        return caught.value.holder

    first = children(as_user(A, read))
    assert server.stalled.wait(60)
    holder = children(as_user(B, waited)).result()
    assert str(first.pid) in holder  # by the catalog: another user's open files are not to be seen
    second = children(as_user(B, read))
    time.sleep(0.3)
    server.go.set()
    assert first.result() == second.result() == body
    assert server.gets == 1


def test_s10_another_users_root_is_refused_with_what_to_do(public: Path, children: Callable[..., Any]) -> None:
    place = public / "as-home"
    place.mkdir()
    os.chown(place, A, A)

    def make() -> None:
        with forebay.Cache(place / "root"):
            pass

    def refused() -> str:
        with pytest.raises(forebay.errors.RootRefused) as caught:
            forebay.Cache(place / "root")
        return str(caught.value)

    children(as_user(A, make)).result()
    said = children(as_user(B, refused)).result()
    assert str(A) in said
    assert "shared=True" in said


def test_s10_a_group_fills_one_array(project: Path, children: Callable[..., Any]) -> None:
    """Each reads what the other put, goes on in the segment that the other left, and may remove the array of both."""

    def first() -> list[bool]:
        with forebay.Cache(project / "root", budget=16 * MiB, shared=True) as cache, cache.samples("a", 10) as samples:
            return [samples.put(i, b"of A" * 1000) for i in range(5)]

    def second() -> list[object]:
        with forebay.Cache(project / "root", shared=True) as cache:
            with cache.samples("a", 10) as samples:
                found = [samples.get(4) == b"of A" * 1000, samples.put(4, b"of B"), samples.put(5, b"of B")]
            return [*found, cache.check(deep=True), cache.evict("samples:a").removed]

    assert children(as_user(A, first, umask=0o077)).result() == [True] * 5
    assert children(as_user(B, second, umask=0o077)).result() == [True, False, True, [], ("samples:a",)]
    assert list((project / "root" / "packs").iterdir()) == []


@pytest.mark.parametrize("door", ["pull", "read"])
def test_s10_a_dead_users_fetch_is_resumed_and_kept_by_another(
    project: Path, server: ScriptedServer, children: Callable[..., Any], door: str
) -> None:
    """Only its owner may set a file's mode and time. What A fetched counts, B stores it, and finds it again; so does A."""
    body = os.urandom(12 * MiB)
    url = server.put("/x.bin", body, stall_after=4 * MiB)

    def begin() -> None:
        with forebay.Cache(project / "root", shared=True, budget="64MiB") as cache:
            cache.read(url)

    def go_on() -> tuple[int, int, list[Any]]:
        with forebay.Cache(project / "root", shared=True) as cache:
            if door == "pull":
                assert cache.pull(url) is not None
            assert cache.read(url) == body
            found = cache.entry(url)
            assert found is not None
            with cache.local(url) as path:
                assert Path(path).stat().st_uid == os.getuid()
            return found.size, cache.stats().bytes_remote, cache.check(deep=True)

    first = children(as_user(A, begin))
    kill_midway(first, server, project / "root")
    size, fetched, problems = children(as_user(B, go_on)).result()
    assert (size, problems) == (12 * MiB, [])
    assert fetched < 10 * MiB  # the rest was there
    gets = server.gets
    assert children(as_user(A, lambda: bytes(forebay.Cache(project / "root", shared=True).read(url)))).result() == body
    assert server.gets == gets
    assert os.listdir(project / "root" / "tmp") == []


def test_s10_what_another_user_left_and_cannot_be_gone_on_from(project: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    """Without a strong validator it is fetched from zero, into a file of one's own."""
    body = os.urandom(8 * MiB)
    url = server.put("/x.bin", body, stall_after=4 * MiB, etag=None)

    def read() -> bool:
        with forebay.Cache(project / "root", shared=True, budget="64MiB") as cache:
            return bytes(cache.read(url)) == body and cache.entry(url) is not None

    first = children(as_user(A, read))
    assert server.stalled.wait(60)
    until(lambda: any(path.stat().st_size for path in (project / "root" / "tmp").iterdir() if not path.suffix), "a partial")
    first.kill()
    (partial,) = [path for path in (project / "root" / "tmp").iterdir() if not path.suffix]
    partial.chmod(0o600)  # killed before the group had its rights
    server.objects["/x.bin"].stall_after = None
    server.go.set()
    assert children(as_user(B, read)).result()


def test_s10_a_root_that_is_given_away_while_a_job_has_it_open(public: Path, server: ScriptedServer) -> None:
    """The job goes on without it."""
    place = public / "as-home"
    place.mkdir()
    os.chown(place, A, A)
    urls = [server.put(f"/{number}.bin", bytes([number]) * 300_000) for number in range(4)]

    def job(line: Any) -> None:
        with forebay.Cache(place / "root", budget=64 * MiB) as cache:
            samples = cache.samples("samples", 10)
            compute = cache.tasks("tasks").cached(lambda x: x + 1, version="1")
            assert (cache.read(urls[0]), samples.get_or_put(0, lambda: b"0"), compute(0)) == (b"\0" * 300_000, b"0", 1)
            line.say("open")
            line.hear()
            for _ in range(2):
                assert cache.read(urls[1]) == b"\1" * 300_000
                assert cache.get_or_put("k", lambda: b"v") == b"v"
                assert samples.get_or_put(1, lambda: b"1") == b"1"
                assert compute(1) == 2
                with cache.open(urls[2]) as file:
                    assert file.read(1) == b"\2"

    with processes.talk_to(lambda line: as_user(A, lambda: job(line))()) as child:
        assert child.hear() == "open"
        for path in [place / "root", *(place / "root").rglob("*")]:
            os.chown(path, B, B, follow_symlinks=False)
        child.say("go")
        child.result()
