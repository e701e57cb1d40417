"""A process dies before the k-th change of a file while it makes a directory: for every k, and with three others that wait for it."""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine.store import Store
from forebay._kernel import host
from forebay.cache import fetcher_of
from forebay.directories import trees
from forebay.directories.location import locate
from forebay.fetch.request import FetchOptions
from forebay.remote import RemoteOptions
from forebay.reports import Progress
from tests import parts
from tests.crash.conftest import MOST, Scene
from tests.harness import KiB, MiB, assert_counted, data_usage
from tests.processes import HANG, ProcessGroup
from tests.remote_directories import files_of
from tests.servers.counting import Shelf, content

NewScene = Callable[[int], Scene]
FILES = {"small": content("small", 20_000), "sub/large": content("large", 300_000)}
CKPT = "bucket/step"
TOTAL = sum(map(len, FILES.values()))
OPTIONS = RemoteOptions(part=64 * KiB, streams=2)


def opened_cache(place: Path) -> forebay.Cache:
    return forebay.Cache(place, remote_options=OPTIONS)


def has_it_whole(place: Path, shelf: Shelf, files: dict[str, bytes] = FILES, **how: Any) -> None:
    with opened_cache(place) as cache, cache.directory(CKPT, filesystem=shelf.fsspec(), **how) as path:
        assert files_of(path) == files


def fetching(there: Scene, shelf: Shelf) -> Callable[[Store], None]:
    return lambda store: has_it_whole(there.place, shelf)


def nothing(store: Store) -> None:
    """An empty root."""


# -- one process, and those that come after it -------------------------------------------------------------------------


def test_a_directory_is_fetched(scene: NewScene, shelf: Shelf) -> None:
    shelf.fill(CKPT, FILES)
    there = scene(2 * MiB)
    fetch = fetching(there, shelf)
    deaths = there.play(nothing, fetch, fetch, least=20)
    assert {"link", "mkdir", "rename", "chmod"} <= {death.split()[0] for death in deaths}


def test_files_that_nobody_could_resume_are_fetched(scene: NewScene, shelf: Shelf) -> None:
    """Without an ETag: those of up to 4 MiB are written and published in one step."""
    files = FILES | {"mid": content("mid", 3 * MiB // 2), "sub/mid": content("sub/mid", 2 * MiB)}
    shelf.fill(CKPT, files)
    there = scene(8 * MiB)

    def fetch(store: Store) -> None:
        with opened_cache(there.place) as cache, cache.directory(CKPT, filesystem=shelf.fsspec(etags=False)) as path:
            assert files_of(path) == files

    deaths = there.play(nothing, fetch, fetch, least=20)
    assert not any(".map" in death for death in deaths)


def test_a_changed_directory_is_fetched(scene: NewScene, shelf: Shelf) -> None:
    """What is handed out is of one version: the one before, or the next."""
    shelf.fill(CKPT, FILES)
    there, next_files = scene(4 * MiB), FILES | {"small": content("next", 21_000)}

    def before(store: Store) -> None:
        shelf.put(f"{CKPT}/small", FILES["small"])
        has_it_whole(there.place, shelf, refresh=True)
        shelf.put(f"{CKPT}/small", next_files["small"])

    def after(store: Store) -> None:
        with opened_cache(there.place) as cache:
            with cache.directory(CKPT, filesystem=shelf.fsspec(), offline=True) as path:
                assert files_of(path) in (FILES, next_files)
            with cache.directory(CKPT, filesystem=shelf.fsspec(), refresh=True) as path:
                assert files_of(path) == next_files

    def during(store: Store) -> None:
        has_it_whole(there.place, shelf, next_files, refresh=True)

    there.play(before, during, after, least=8)


def test_room_is_made_for_a_directory(scene: NewScene, shelf: Shelf) -> None:
    """Another directory goes for it: tree, rows and files."""
    shelf.fill(CKPT, FILES)
    shelf.fill("bucket/old", {name: body[::-1] for name, body in FILES.items()})
    there = scene(500 * KiB)

    def before(store: Store) -> None:
        with opened_cache(there.place) as cache:
            cache.directory("bucket/old", filesystem=shelf.fsspec()).close()

    fetch = fetching(there, shelf)
    there.play(before, fetch, fetch, least=20, small_first=False)


def test_a_part_and_then_the_rest(scene: NewScene, shelf: Shelf) -> None:
    shelf.fill(CKPT, FILES)
    there = scene(2 * MiB)

    def before(store: Store) -> None:
        with opened_cache(there.place) as cache:
            cache.directory(CKPT, filesystem=shelf.fsspec(), include="sub/").close()

    fetch = fetching(there, shelf)
    there.play(before, fetch, fetch, least=8)


def test_a_file_is_put_beside_others(scene: NewScene, shelf: Shelf) -> None:
    """The directory of a file that another process got grows by the next one; a killed process leaves nothing that is not counted."""
    shelf.fill(CKPT, FILES)
    there = scene(2 * MiB)

    def beside(name: str) -> Path:
        with opened_cache(there.place) as cache:
            fetcher = fetcher_of(cache)
            location, options = locate(fetcher, CKPT, shelf.fsspec(), name), FetchOptions.of(fetcher)
            with trees.beside(location, trees.lease(location, options), "bucket/", options) as path:
                assert Path(path, name).read_bytes() == FILES[name]
                return Path(path)

    def after(store: Store) -> None:
        assert {str(file.relative_to(path)) for path in [beside("small")] for file in path.rglob("*") if file.is_file()} >= {"small"}
        assert beside("sub/large") == beside("small")
        assert files_of(str(beside("small"))) == FILES

    deaths = there.play(lambda store: beside("small"), lambda store: beside("sub/large"), after, least=8)
    assert {"link", "mkdir", "chmod", "commit"} <= {death.split()[0] for death in deaths}


def test_a_copy_of_ones_own(scene: NewScene, shelf: Shelf) -> None:
    """Killed while it is made, it is not there, or is finished by the next call; beside it nothing is left."""
    shelf.fill(CKPT, FILES)
    there = scene(2 * MiB)
    target = there.folder / "copies" / "mine"

    def copy() -> None:
        with opened_cache(there.place) as cache:
            forebay.Checkpoint(CKPT, shelf.fsspec(), cache=cache).to_directory(target)

    def before(store: Store) -> None:
        with opened_cache(there.place) as cache:
            cache.directory(CKPT, filesystem=shelf.fsspec()).close()

    def after(store: Store) -> None:
        if target.exists():
            assert files_of(target) == FILES
        copy()
        assert files_of(target) == FILES
        assert sorted(os.listdir(target.parent)) == ["mine"]

    there.play(before, lambda store: copy(), after, least=5)


# -- three that wait ---------------------------------------------------------------------------------------------------


class Stage:
    """A downloader that stops before its k-th step until it is killed, and three that want the same."""

    def __init__(self, place: Path, shelf: Shelf, children: ProcessGroup) -> None:
        self.place, self.shelf, self.children = place, shelf, children

    def run(self, step: int) -> str | None:
        """Before which step it died; None if it came to its end."""
        forebay.Cache(self.place, budget=2 * MiB, min_free=0).close()
        ours, theirs = os.pipe()
        downloader = self.children(lambda: self._download(step, theirs))
        os.close(theirs)
        said = os.read(ours, 200).decode()
        os.close(ours)
        if said == "done":
            downloader.result()
            return None
        reads, write = os.pipe()
        waiters = [self.children(lambda: self._wait(write)) for _ in range(3)]
        os.close(write)
        heard = 0
        while heard < 3 and select.select([reads], [], [], 0.3)[0]:  # who waits for the catalog's own lock says nothing
            heard += len(os.read(reads, 3 - heard))
        os.kill(downloader.pid, signal.SIGKILL)
        assert downloader.wait() == -signal.SIGKILL
        assert [waiter.result(HANG) for waiter in waiters] == [FILES] * 3, said
        os.close(reads)
        return said

    def _download(self, step: int, pipe: int) -> None:
        left = itertools.count()

        def hook(name: str, subject: str) -> None:
            if next(left) == step:
                os.write(pipe, f"{name} {os.path.basename(subject)}".encode())
                signal.pause()

        with opened_cache(self.place) as cache:
            host.on_step(hook)
            with cache.directory(CKPT, filesystem=self.shelf.fsspec()) as path:
                assert files_of(path) == FILES
        os.write(pipe, b"done")

    def _wait(self, pipe: int) -> dict[str, bytes]:
        said = False

        def told(progress: Progress) -> None:
            nonlocal said
            if not said:
                said = True
                os.write(pipe, b".")

        with opened_cache(self.place) as cache, cache.directory(CKPT, filesystem=self.shelf.fsspec(), on_progress=told) as path:
            return files_of(path)


def test_killed_at_every_step_with_three_waiters(quick_path: Path, shelf: Shelf, children: ProcessGroup) -> None:
    """Each of them ends with the complete directory, and each byte came twice at most."""
    shelf.fill(CKPT, FILES)
    deaths = []
    for step in filter(parts.takes, range(MOST)):
        place = quick_path / f"root-{step}"
        shelf.forget()
        died = Stage(place, shelf, children).run(step)
        assert shelf.sent <= 2 * TOTAL
        with forebay.Cache(place) as cache:
            assert cache.check(deep=True) == []
            assert cache.put("brim", bytes(cache.budget - 65_536))
            assert cache.stats().bytes_reserved == 0
        assert_counted(place, 2 * MiB)
        assert data_usage(place) <= 2 * MiB
        if died is None:
            break
        deaths.append(died)
    assert len(deaths) >= parts.share(20), deaths


@pytest.mark.parametrize("face", ["fsspec", "arrow"])
def test_killed_while_it_reads_with_three_waiters(quick_path: Path, shelf: Shelf, children: ProcessGroup, face: str) -> None:
    """In the midst of each file's bytes."""
    shelf.fill(CKPT, FILES)
    for name, body in FILES.items():
        place = quick_path / f"root-{len(body)}"
        forebay.Cache(place, budget=2 * MiB, min_free=0).close()
        shelf.forget()
        shelf.stall(f"{CKPT}/{name}", after=len(body) // 2)

        def use(place: Path = place) -> dict[str, bytes]:
            with opened_cache(place) as cache, cache.directory(CKPT, filesystem=getattr(shelf, face)()) as path:
                return files_of(path)

        downloader = children(use)
        shelf.wait("stalled")
        waiters = [children(use) for _ in range(3)]
        downloader.kill()
        shelf.go(f"{CKPT}/{name}")
        assert [waiter.result() for waiter in waiters] == [FILES] * 3
        assert shelf.sent <= TOTAL + 300_000  # what was whole is not read again
