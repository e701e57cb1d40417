"""Scenario 13: the disk is full, or another program fills it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._kernel import host
from forebay.testing import ScriptedServer

MiB = 1 << 20


def fill_up(place: Path) -> Path:
    """Another program takes the whole disk."""
    path = place / "somebody-elses"
    with open(path, "wb", buffering=0) as file:
        size = MiB
        while size >= 4096:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return path


@pytest.mark.rotates
def test_s13_a_budget_larger_than_the_disk(
    tmpfs: Callable[[str], Path], server: ScriptedServer, children: Callable[..., Any], warnings: Any
) -> None:
    place = tmpfs("64m")
    bodies = [random.Random(i).randbytes(3 * MiB + i) for i in range(30)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]

    def train(seed: int) -> tuple[int, list[str]]:
        order = random.Random(seed).choices(range(30), k=60)
        with warnings() as said, forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache:
            for i in order:
                assert cache.read(urls[i]) == bodies[i]
                cache.put(f"value-{seed}-{i}", bodies[i][: 1 << (8 + i % 10)])
            return cache.stats().hits, said

    for child in [children(lambda seed=seed: train(seed)) for seed in range(3)]:
        hits, said = child.result(120)
        assert hits
        assert len(said) <= 4  # one of each kind: a value, or an object, for which the disk, or the catalog, has no room
    with forebay.Cache(place / "root") as cache:
        assert cache.check(deep=True) == []


def test_s13_another_program_fills_the_disk(tmpfs: Callable[[str], Path], server: ScriptedServer, warnings: Any) -> None:
    place = tmpfs("64m")
    bodies = [random.Random(i).randbytes(MiB + i) for i in range(40)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    with warnings() as said, forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache:
        for url, body in zip(urls[:20], bodies[:20], strict=True):
            assert cache.read(url) == body
        taken = fill_up(place)
        for url, body in zip(urls, bodies, strict=True):
            assert cache.read(url) == body
            with cache.open(url) as file:
                assert file.read() == body
            cache.put(url, body[:1000])
        assert len(said) <= 3
        taken.unlink()
        for _ in range(2):
            for url, body in zip(urls[:10], bodies[:10], strict=True):
                assert cache.read(url) == body
        assert all(cache.entry(url) is not None for url in urls[:10])  # it works again by itself
        assert cache.check(deep=True) == []


def test_s13_min_free_stays_free(tmpfs: Callable[[str], Path], server: ScriptedServer) -> None:
    place = tmpfs("64m")
    bodies = [random.Random(i).randbytes(MiB + i) for i in range(60)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    with forebay.Cache(place / "root", budget="1GiB", min_free="10%") as cache:
        for url, body in zip(urls, bodies, strict=True):
            assert cache.read(url) == body
            assert host.disk(place).free >= 0.09 * 64 * MiB  # less what the catalog's journal takes
        kept = len(cache.entries())
        assert 30 < kept < 58
        other = place / "somebody-elses"
        other.write_bytes(bytes(host.disk(place).free - MiB))
        for url, body in zip(urls[:12], bodies[:12], strict=True):
            assert cache.read(url) == body
        assert len(cache.entries()) < kept  # it shrank itself
        assert host.disk(place).free >= 0.08 * 64 * MiB
        other.unlink()
        cache.read(urls[0])
        assert cache.check(deep=True) == []


def test_s13_min_free_larger_than_what_is_there(tmpfs: Callable[[str], Path], server: ScriptedServer, warnings: Any) -> None:
    place = tmpfs("64m")
    body = os.urandom(MiB)
    url = server.put("/x.bin", body)
    with warnings() as said, forebay.Cache(place / "root", min_free="99%") as cache:
        for _ in range(3):
            assert cache.read(url) == body
        assert cache.entries() == []
    assert len(said) == 1


def test_s13_no_room_to_make_a_root(tmpfs: Callable[[str], Path], server: ScriptedServer, warnings: Any) -> None:
    place = tmpfs("1m")
    (place / "root").mkdir(mode=0o700)
    fill_up(place)
    body = os.urandom(MiB)
    url = server.put("/x.bin", body)
    with warnings() as said, forebay.Cache(place / "root") as cache:
        for _ in range(3):
            assert cache.read(url) == body
        assert cache.put("key", b"value") is False
        assert cache.get_or_put("key", lambda: b"value") == b"value"
    assert 1 <= len(said) <= 3


@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT"])
def test_s13_a_quota_of_the_file_system(root: Path, server: ScriptedServer, warnings: Any, kind: str) -> None:
    """What cannot be mounted here is raised where files are changed."""
    import errno

    bodies = [os.urandom(MiB) for _ in range(6)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    number = getattr(errno, kind)

    def refuse(call: str, subject: str) -> None:
        if call in ("pwrite", "allocate", "create"):
            raise OSError(number, os.strerror(number))

    with warnings() as said, forebay.Cache(root) as cache:
        assert cache.read(urls[0]) == bodies[0]
        host.on_step(refuse)
        try:
            for url, body in zip(urls, bodies, strict=True):
                assert cache.read(url) == body
        finally:
            host.on_step(None)
        assert len(said) == 1
        assert cache.stats().fallbacks == 5
        assert cache.read(urls[5]) == bodies[5]
        assert cache.entry(urls[5]) is not None


def forebay_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "forebay.cli", *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("attached", [False, True], ids=["nobody attached", "attached"])
def test_s13_removing_works_when_it_is_needed_most(tmpfs: Callable[[str], Path], children: Callable[..., Any], attached: bool) -> None:
    """Not a block is free, again and again: entries can be seen and removed, also small ones, which bring back less than removing takes."""
    place = tmpfs("64m")
    root = place / "root"
    with forebay.Cache(root, budget="1GiB", min_free=0) as cache:
        for n in range(24):
            assert cache.put(f"k{n:02}", bytes([n]) * (MiB if n % 2 else 60_000))
    seen, end = os.pipe(), os.pipe()

    def look_on() -> None:
        with forebay.Cache(root) as cache:
            cache.get("k00")
            os.write(seen[1], b".")
            os.read(end[0], 1)

    if attached:
        child = children(look_on)
        os.read(seen[0], 1)
    taken = [fill_up(place)]

    def fill_again() -> None:
        taken.append(fill_up(place).rename(place / f"more-{len(taken)}"))
        assert host.disk(place).free == 0

    taken[0] = taken[0].rename(place / "more-0")
    assert host.disk(place).free == 0
    listed = forebay_cli("ls", "-q", "-C", root)
    assert (listed.returncode, len(listed.stdout.split())) == (0, 24), listed.stderr
    assert forebay_cli("verify", "-C", root).stdout.startswith("no problems found (")
    for n in range(4):
        removed = forebay_cli("rm", f"values:k{n:02}", "-C", root)
        assert (removed.returncode, "1 entry removed" in removed.stdout) == (0, True), removed.stderr
        fill_again()
    with forebay.Cache(root) as cache:
        for n in range(4, 6):
            assert cache.evict(f"values:k{n:02}").removed == (f"values:k{n:02}",)
            fill_again()
        cache.pin("values:k10")
        fill_again()
        plan = cache.plan("2MiB")
        assert sum(victim.charge for victim in plan.victims) >= 2 * MiB  # the disk lacks it, the budget does not
        assert len(plan.execute().removed) == len(plan.victims)
        fill_again()
    with forebay.Cache(root, budget=5 * MiB) as cache:
        assert 0 < cache.stats().bytes_used <= 5 * MiB
        fill_again()
        assert cache.get("k10") is not None
        assert cache.put("new", bytes(300_000))  # it evicts for it
    fill_again()
    cleared = forebay_cli("clear", "--yes", "-C", root)
    assert (cleared.returncode, "0 entries removed" in cleared.stdout) == (0, False), cleared.stderr
    if attached:
        os.write(end[1], b".")
        child.result()
    for fd in (*seen, *end):
        os.close(fd)
    for path in taken:
        path.unlink()
    with forebay.Cache(root) as cache:
        assert [entry.key for entry in cache.entries()] == ["k10"]
        cache.put("x", b"y")
        assert (root / "catalog.ballast").stat().st_size == 4 * MiB
        assert cache.check(deep=True) == []


def test_s13_a_verb_that_cannot_look_says_so(tmpfs: Callable[[str], Path]) -> None:
    """The journal is there and its index is not, which takes room: neither "nothing is there" nor "no problems found" is the truth."""
    place = tmpfs("64m")
    root = place / "root"
    with forebay.Cache(root, budget="1GiB", min_free=0) as cache:
        assert cache.put("k", bytes(MiB))
        copy = (root / "catalog.sqlite-wal").read_bytes()
    (root / "catalog.sqlite-wal").write_bytes(copy)
    (root / "catalog.ballast").unlink()
    fill_up(place)
    for verb, truth in (
        ("ls", "values:k"),
        ("stats", "1.05 MB"),
        ("verify", "no problems found (1 entry)"),
        ("du", "1.05 MB"),
        ("clear", "values:k"),
    ):
        found = forebay_cli(verb, *(["--dry-run"] if verb == "clear" else []), "-C", root)
        assert (found.returncode, "error: " in found.stderr) == (1, True) or (found.returncode == 0 and truth in found.stdout), (
            verb,
            found,
        )


def test_s13_reading_evicts_where_the_disk_is_full(tmpfs: Callable[[str], Path], server: ScriptedServer) -> None:
    place = tmpfs("64m")
    bodies = [random.Random(i).randbytes(MiB + i) for i in range(8)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    with forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache:
        for n in range(10):
            assert cache.put(f"k{n}", bytes(MiB))
    fill_up(place)
    with forebay.Cache(place / "root") as cache:
        for url, body in zip(urls, bodies, strict=True):
            assert cache.read(url) == body
        assert sum(cache.entry(url) is not None for url in urls) >= 4
        assert cache.check(deep=True) == []
