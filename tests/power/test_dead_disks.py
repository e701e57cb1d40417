"""A disk that dies under a job: every call of every front is served from the source. And one that is mounted read-only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import host
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.power.disks import KINDS, LOG_FLUSHED, NOTHING_FLUSHED, disk, hide_mounts, run
from tests.processes import Line, in_child, talk_to
from tests.remote_directories import files_of
from tests.servers.counting import Shelf

pytestmark = pytest.mark.root

FILES = {"a": b"a" * 3000, "b/c": b"c" * 200_000}


def body(number: int) -> bytes:
    return bytes([number]) * 5_000


def below(urls: list[str]) -> str:
    return urls[0].rpartition("/")[0] + "/"


MAY_RAISE = frozenset({"directory", "len", "set_limits", "keys", "evict", "entry", "history", "overhead", "check", "plan"})
"""Calls that raise a `CacheFault` if the cache cannot be read or changed: they have nothing else to give."""


def calls(cache: forebay.Cache, pool: Any, urls: list[str], shelf: Shelf, number: int) -> dict[str, Callable[[], object]]:
    """One of each front, for things that were not asked for before; and what each should give. ``pool``: a prefetcher with limits."""
    samples = cache.samples("samples", 100, codec="raw")
    compute = cache.tasks("tasks").cached(body)
    name = f"{number}.bin"

    def opened() -> bytes:
        with cache.open(urls[number + 1]) as file:
            return file.read()

    def by_blocks() -> bytes:
        with cache.open(urls[number + 2], block_size="64KB") as file:
            return file.read()

    def directory() -> dict[str, bytes]:
        with cache.directory(f"bucket/{number}", filesystem=shelf.fsspec()) as path:
            return files_of(path)

    def loaded(**options: object) -> bool:
        with cache.prefetcher(below(urls), **options) as pool:
            items = [*pool.stream([name]), pool.get_lazy(name).get()]
            return list(map(bytes, items)) == [body(number)] * 2 and min(pool.count, pool.used) >= 0

    def ahead(**options: object) -> bool:
        order = urls[number : number + 3]
        with cache.lookahead(order, **options) as objects:
            return [bytes(objects.read(order[0])), *map(bytes, objects)] == [body(number + more) for more in range(3)]

    def of_a_limit(make: Callable[[], bytes]) -> bool:
        in_samples = cache.samples(f"of a limit {number}", 5, codec="raw", quota=MiB).get_or_put(1, make)
        in_space = [cache.space(name, quota=quota).get_or_put("limited", make) for name, quota in (("v", MiB), (f"v{number}", "5%"))]
        return [*in_space, in_samples, cache.tasks("tasks", budget=MiB).cached(body)(number + 6)] == [make()] * 3 + [body(number + 6)]

    def listed(tag: str) -> bool:
        tasks = cache.tasks("tasks")
        return not tasks.has(tag) and tag not in set(tasks.keys()) and min(len(tasks), tasks.size_bytes(), tasks.stats().entries) >= 0

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
        "a prefetcher": lambda: loaded(),
        "a prefetcher with limits": lambda: loaded(name="new", budget=MiB) and loaded(name="limited", budget=2 * MiB, max_count=number + 9),
        "a prefetcher by shares": lambda: loaded(name="limited", budget="5%") and loaded(name="short", keep=False),
        "lookahead": lambda: ahead() and ahead(window=MiB) and ahead(window="5%"),
        "that prefetcher": lambda: [*pool.stream([name])] == [body(number)] and min(pool.count, pool.used) >= 0,
        "in": lambda: [f"none {number}" in each for each in (cache, cache.space("v"))] == [False, False],
        "limits": lambda: of_a_limit(lambda: body(4)),
        "of tasks": lambda: listed(f"none {number}"),
        "budget": lambda: cache.budget == 50 * MiB,
        "set_limits": lambda: pool.set_limits(budget=2 * MiB, max_count=number + 9) is None,
        "len": lambda: len(cache.entries()) >= 0,
        "keys": lambda: list(cache) != [""],
        "evict": lambda: cache.space("v").evict("k") in (True, False),
        "entry": lambda: cache.entry(f"none {number}") is None,
        "history": lambda: cache.history() is not None,
        "overhead": lambda: cache.overhead() is not None,
        "check": lambda: cache.check() is not None,
        "plan": lambda: cache.plan("1MB") is not None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "how", "before"),
    [("ext4", NOTHING_FLUSHED, "nothing"), *itertools.product(KINDS, (LOG_FLUSHED, NOTHING_FLUSHED), ["one of each"])],
)
def test_a_disk_that_dies_under_a_job(server: ScriptedServer, shelf: Shelf, kind: str, how: int, before: str) -> None:
    """XFS sends SIGBUS to a process that stores to a mapped page of such a disk for the first time."""
    urls = [server.put(f"/{number}.bin", body(number)) for number in range(100)]
    for number in (0, 50):
        shelf.fill(f"bucket/{number}", FILES)
    with disk(kind) as place:

        def job(line: Line) -> dict[str, str]:
            cache = forebay.Cache(place.place / "root", budget=50 * MiB, min_free=0)
            pool = cache.prefetcher(below(urls), name="of before", budget=MiB)
            if before == "one of each":
                wrong = [name for name, call in calls(cache, pool, urls, shelf, 0).items() if not call()]
                assert not wrong
            line.say("open")
            line.hear()
            found = {}
            for name, call in calls(cache, pool, urls, shelf, 50).items():
                try:
                    found[name] = "right" if call() else "wrong"
                except errors.CacheFault as error:
                    found[name] = "right" if name in MAY_RAISE else f"{type(error).__name__}: {error}"
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"
            return found

        with talk_to(job) as child:
            assert child.hear() == "open"
            place.lose_power(how)
            child.say("go")
            found = child.result()
        assert {name: what for name, what in found.items() if what != "right"} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_root_on_a_dead_disk(server: ScriptedServer, kind: str) -> None:
    url = server.put("/a", body(1))
    with disk(kind) as place:
        root = place.place / "root"

        def use(place: Path) -> bool:
            with forebay.Cache(place, budget="100MB") as cache:
                return bool(cache.read(url) == body(1) and cache.get_or_put("k", lambda: b"x") == b"x")

        with talk_to(lambda _: use(root)) as child:
            assert child.result()
        place.lose_power(NOTHING_FLUSHED)
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
