"""A root whose processes left it in order is opened without its catalog: the first call that needs it opens it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay._engine.parts import Parts
from tests.harness import MiB, assert_settled
from tests.processes import fork, fork_to_die, in_child, steps_of

BUDGET = 8 * MiB
LARGE = os.urandom(100_000)


@pytest.fixture
def place(quick_path: Path) -> Path:
    def fill() -> None:
        with forebay.Cache(quick_path / "root", budget=BUDGET) as cache:
            assert cache.put("large", LARGE)
            assert cache.put("small", b"small")

    in_child(fill)
    return quick_path / "root"


@pytest.fixture
def cache(place: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(place) as cache:
        yield cache


def has_catalog_open() -> bool:
    """Whether this process has it open, or mapped."""
    return "catalog.sqlite" in Path("/proc/self/maps").read_text()


def test_hits_need_no_catalog(place: Path) -> None:
    def hit() -> None:
        with forebay.Cache(place) as cache:
            for _ in range(3):
                assert cache.get("large") == LARGE
                assert cache.get("small") == b"small"
            assert not has_catalog_open()
            assert cache.get("missing") is None
            assert has_catalog_open()

    in_child(hit)


@pytest.mark.parametrize("name", ["catalog.sqlite", "shared/head"])
def test_what_is_lost_is_seen_when_the_root_is_opened(place: Path, name: str) -> None:
    (place / name).unlink()

    def look() -> None:
        with forebay.Cache(place) as cache:
            assert has_catalog_open()
            assert cache.put("new", b"new")

    in_child(look)
    in_child(lambda: assert_settled(place, BUDGET))


def test_what_was_left_half_done_is_ended_when_the_root_is_opened(place: Path) -> None:
    def put() -> None:
        with forebay.Cache(place) as cache:
            cache.put("large", LARGE[::-1])

    step = next(number for number, step in enumerate(steps_of(put)) if "committed" in step)
    assert fork_to_die(step, put).wait() == -signal.SIGKILL

    def look() -> None:
        with forebay.Cache(place) as cache:
            assert has_catalog_open()
            assert cache.get("large") == LARGE[::-1]

    in_child(look)
    in_child(lambda: assert_settled(place, BUDGET))


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(100_000))


def somebodys(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "theirs").touch()


@pytest.mark.parametrize(("damage", "is_mended"), [(noise, True), (somebodys, False)])
def test_hits_are_served_whatever_became_of_the_catalog(place: Path, damage: Callable[[Path], None], is_mended: bool) -> None:
    damage(place / "catalog.sqlite")

    def use() -> None:
        with forebay.Cache(place) as cache:
            assert cache.get("large") == LARGE
            assert cache.get("small") == b"small"
            assert cache.put("new", b"new") is is_mended
            assert (cache.get("new") == b"new") is is_mended
            # A new catalog knows nothing of what was there; without one, the records are all there is.
            assert (cache.get("large") is None) is is_mended

    in_child(use)


def test_threads_that_need_the_catalog_first_open_it_together(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started, together = Parts.start, list[int](), threading.Barrier(8)

    def counted(self: Parts) -> None:
        started.append(threading.get_ident())
        start(self)

    def first(number: int) -> None:
        together.wait()
        assert cache.put(str(number), b"value")

    monkeypatch.setattr(Parts, "start", counted)
    threads = [threading.Thread(target=first, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.get(str(number)) for number in range(8)] == [b"value"] * 8
    assert len(started) == 1


def test_a_fork_while_a_thread_opens_the_catalog(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has no such thread, and opens it itself."""
    start, is_open, go_on = Parts.start, threading.Event(), threading.Event()

    def slow(self: Parts) -> None:
        start(self)
        is_open.set()
        go_on.wait()

    monkeypatch.setattr(Parts, "start", slow)
    thread = threading.Thread(target=lambda: cache.put("parent", b"value"))
    thread.start()
    is_open.wait()

    def child() -> None:
        monkeypatch.undo()
        assert cache.put("child", b"value")
        assert cache.get("large") == LARGE

    fork(child).result()
    go_on.set()
    thread.join()
    assert (cache.get("parent"), cache.get("child")) == (b"value", b"value")


def test_children_of_a_process_that_only_read_open_catalogs_of_their_own(cache: forebay.Cache) -> None:
    assert cache.get("large") == LARGE

    def child(number: int) -> None:
        assert cache.put(str(number), b"value")

    for each in [fork(lambda number=number: child(number)) for number in range(4)]:  # type: ignore[misc]
        each.result()
    assert cache.put("parent", b"value")
    assert [cache.get(str(number)) for number in range(4)] == [b"value"] * 4


def test_a_catalog_that_is_opened_late_gives_its_limits_and_spaces(place: Path) -> None:
    in_child(lambda: forebay.Cache(place).space("own", quota=2 * MiB).put("k", b"v"))

    def use() -> None:
        with forebay.Cache(place) as cache:
            own = cache.space("own")
            assert own.get("k") == b"v"
            assert not own.put("large", bytes(3 * MiB))
            assert cache.budget == BUDGET

    in_child(use)
