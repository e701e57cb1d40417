"""Threads and processes use a root that is deleted, replaced and overwritten all the time: no stale byte, no hang, nothing uncounted."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts
from tests.harness import MiB, assert_counted
from tests.items import by_threads
from tests.processes import Child, ProcessGroup, ended, in_child
from tests.versions import Versions

THREADS, KEYS, BUDGET, SECONDS = 3, 12, 6 * MiB, 10
"""Threads of each of two processes; keys of each thread."""


def delete_catalog(root: Path, spare: Path) -> None:
    (root / "catalog.sqlite").unlink(missing_ok=True)


def delete_catalog_and_log(root: Path, spare: Path) -> None:
    for path in root.glob("catalog.sqlite*"):
        path.unlink(missing_ok=True)


def delete_shared(root: Path, spare: Path) -> None:
    for path in (root / "shared").glob("*"):
        path.unlink(missing_ok=True)


def delete_root(root: Path, spare: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)  # files come meanwhile


def swap_roots(root: Path, spare: Path) -> None:
    aside = spare.with_name("aside")
    try:
        root.rename(aside)
        spare.rename(root)
        aside.rename(spare)
    except OSError:  # a root was made at the path between the two
        if aside.exists() and not spare.exists():
            aside.rename(spare)


def write_garbage(root: Path, spare: Path) -> None:
    path = root / "catalog.sqlite"
    if path.exists():
        with path.open("r+b") as file:
            file.seek(4096 * random.randrange(max(1, path.stat().st_size // 4096)))
            file.write(os.urandom(4096))


BREAKS: dict[str, Callable[[Path, Path], None]] = {
    "the catalog is deleted": delete_catalog,
    "the catalog and its log are deleted": delete_catalog_and_log,
    "shared files are deleted": delete_shared,
    "the root is deleted": delete_root,
    "two roots change places": swap_roots,
    "a page of the catalog is garbage": write_garbage,
}


def live(root: Path, versions: Versions, urls: dict[str, bytes], first: int, seconds: float, *, any_version: bool) -> None:
    """Use the root in threads until the time is up, and fork now and then."""
    with forebay.Cache(root, budget=BUDGET, min_free=0) as cache:
        space, seen = cache.space("versions"), [dict[int, int]() for _ in range(THREADS)]

        def work(number: int, chance: random.Random) -> None:
            key = (first + number) * KEYS + chance.randrange(KEYS)
            act = chance.random()
            if act < 0.4:
                versions.put(space, key)
            elif act < 0.8:
                versions.get(space, key, None if any_version else seen[number])
            elif act < 0.9:
                versions.get(space, chance.randrange(2 * THREADS * KEYS), None)
            elif act < 0.98 or number:
                url, right = chance.choice([*urls.items()])
                assert cache.read(url) == right
            else:
                pid = os.fork()
                if not pid:
                    code = 1
                    try:
                        versions.get(space, key, None)
                        space.put("of a child", b"c" * 30_000)
                        code = 0
                    finally:
                        os._exit(code)
                assert ended(pid) == 0

        by_threads(work, THREADS, seconds)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [*BREAKS, "whatever comes"])
def test_a_root_that_is_broken_again_and_again(server: ScriptedServer, tmp_path: Path, how: str) -> None:
    root, spare, chance = tmp_path / "root", tmp_path / "spare", random.Random(how)
    breaks = [BREAKS[how]] if how in BREAKS else [*BREAKS.values()]
    urls = {server.put(f"/{n}.bin", (body := random.Random(n).randbytes(5_000 * n + 1))): body for n in range(12)}
    versions, seconds = Versions(2 * THREADS * KEYS), float(parts.share(SECONDS))
    if swap_roots in breaks:
        in_child(lambda: forebay.Cache(spare, budget=BUDGET, min_free=0).close())
    group, done = ProcessGroup(), 0

    def use(first: int) -> Child:
        return group(lambda: live(root, versions, urls, first, seconds, any_version=swap_roots in breaks))

    try:
        children = [use(0), use(THREADS)]
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            time.sleep(chance.uniform(0.05, 0.3))  # the moments of the breaks
            chance.choice(breaks)(root, spare)
            done += 1
        for child in children:
            child.result(120)
    finally:
        group.kill()
    assert done > 5
    for place in [path for path in (root, spare) if path.exists()]:
        in_child(lambda place=place: look(place))
        assert_counted(place, BUDGET)


def look(place: Path) -> None:
    with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
        assert cache.put("after", b"a" * 30_000)
        cache.repair()
        assert cache.check(deep=True) == []
