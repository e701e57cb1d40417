"""A disk that dies under a job: every call of every front is served from the source. And one that is mounted read-only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._kernel import host
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.power.disks import NOTHING_FLUSHED, Disk, disk, hide_mounts, run
from tests.processes import Line, in_child, talk_to
from tests.remote_directories import files_of
from tests.servers.counting import Shelf

pytestmark = pytest.mark.root

FILES = {"a": b"a" * 3000, "b/c": b"c" * 200_000}


def body(number: int) -> bytes:
    return bytes([number]) * 5_000


def calls(cache: forebay.Cache, urls: list[str], shelf: Shelf, number: int) -> dict[str, Callable[[], object]]:
    """One of each front, for things that were not asked for before; and what each should give."""
    samples = cache.samples("samples", 100, codec="raw")
    compute = cache.tasks("tasks").cached(body)

    def opened() -> bytes:
        with cache.open(urls[number + 1]) as file:
            return file.read()

    def by_blocks() -> bytes:
        with cache.open(urls[number + 2], block_size="64KB") as file:
            return file.read()

    def directory() -> dict[str, bytes]:
        with cache.directory(f"bucket/{number}", filesystem=shelf.fsspec()) as path:
            return files_of(path)

    return {
        "read": lambda: cache.read(urls[number]) == body(number),
        "open": lambda: opened() == body(number + 1),
        "open by blocks": lambda: by_blocks() == body(number + 2),
        "read_many": lambda: list(cache.read_many(urls[number + 3 : number + 5])) == [body(number + 3), body(number + 4)],
        "get_or_put": lambda: cache.get_or_put(f"k{number}", lambda: body(1)) == body(1),
        "put": lambda: cache.put(f"p{number}", body(2)) in (None, True, False),
        "get": lambda: cache.get(f"none {number}") is None,
        "samples": lambda: samples.get_or_put(number, lambda: body(3)) == body(3),
        "task": lambda: compute(number) == body(number),
        "a space": lambda: cache.space("v").put("k", b"x") in (None, True, False),
        "stats": lambda: cache.stats().hits >= 0,
        "directory": lambda: isinstance(directory(), dict),
    }  # fmt: skip


def die(place: Disk) -> None:
    place.lose_power(NOTHING_FLUSHED)


@pytest.mark.parametrize("before", ["nothing", "one of each"])
def test_a_disk_that_dies_under_a_job(server: ScriptedServer, shelf: Shelf, before: str) -> None:
    """XFS sends SIGBUS to a process that stores to a mapped page of such a disk."""
    urls = [server.put(f"/{number}.bin", body(number)) for number in range(100)]
    for number in (0, 50):
        shelf.fill(f"bucket/{number}", FILES)
    with disk("ext4") as place:

        def job(line: object) -> dict[str, str]:
            cache = forebay.Cache(place.place / "root", budget=50 * MiB, min_free=0)
            if before == "one of each":
                assert all(call() for call in calls(cache, urls, shelf, 0).values())
            line.say("open")
            line.hear()
            found = {}
            for name, call in calls(cache, urls, shelf, 50).items():
                try:
                    found[name] = "right" if call() else "wrong"
                except errors.CacheFault:
                    found[name] = "right" if name == "directory" else "the cache's fault"
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"
            return found

        with talk_to(job) as child:
            assert child.hear() == "open"
            die(place)
            child.say("go")
            found = child.result()
        assert {name: what for name, what in found.items() if what != "right"} == {}


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_root_on_a_dead_disk(server: ScriptedServer, kind: str) -> None:
    url = server.put("/a", body(1))
    with disk(kind) as place:
        root = place.place / "root"

        def use(place: Path) -> bool:
            with forebay.Cache(place, budget="100MB") as cache:
                return bool(cache.read(url) == body(1) and cache.get_or_put("k", lambda: b"x") == b"x")

        with talk_to(lambda _: use(root)) as child:
            assert child.result()
        die(place)
        for there in (root, place.place / "new"):
            with talk_to(lambda _, there=there: use(there)) as child:
                assert child.result()


def test_a_disk_that_is_mounted_read_only(server: ScriptedServer) -> None:
    """What is there is served; a root that would have to be created there is refused."""
    url = server.put("/a", body(1))
    with disk("ext4") as place:

        def use(there: Path) -> bytes:
            with forebay.Cache(there, budget="100MB") as cache:
                return bytes(cache.read(url))

        assert in_child(lambda: use(place.place / "root")) == body(1)
        run("mount", "-o", "remount,ro", place.place)
        assert in_child(lambda: use(place.place / "root")) == body(1)
        assert server.gets == 1
        with pytest.raises(errors.RootRefused, match=r"Read-only file system.*choose another directory"):
            in_child(lambda: use(place.place / "new"))


def test_processes_that_see_the_mount_and_one_that_does_not_share_a_root() -> None:
    """To either of them, what the other one writes is of another epoch. The one writes a third, then the other, then the first again."""
    with disk("ext4") as place:
        root = place.place / "root"
        seen = host.mount_number(place.place)

        def use(line: Line) -> int:
            with forebay.Cache(root, budget="100MB") as cache:
                samples, made = cache.samples("samples", 300), 0
                while (third := line.hear()) is not None:
                    for number in range(third * 100):
                        right = body(number % 256)
                        made += number not in samples
                        assert samples.get_or_put(number, lambda right=right: right) == right
                        assert cache.get_or_put(f"k{number}", lambda right=right: right) == right
                    line.say("done")
                return made

        def use_blindly(line: Line) -> int:
            hide_mounts()
            assert (host.mount_number(place.place), seen > 0) == (0, True)
            return use(line)

        with talk_to(use) as one, talk_to(use_blindly) as other:
            for child, third in ((one, 1), (other, 2), (one, 3), (other, 3)):
                child.say(third)
                assert child.hear() == "done"
            for child, made in ((one, 200), (other, 100)):
                child.say(None)
                assert child.result() == made
        with forebay.Cache(root) as cache:
            assert cache.check(deep=True) == []
