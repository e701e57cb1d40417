"""Scenario 31: a root that may only be read serves hits; misses go to a second tier, or to the source."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.cli import main
from forebay.testing import ScriptedServer
from tests.processes import as_user

MiB = 1 << 20
NOBODY = 65534


def picture(place: Path) -> dict[str, tuple[int, int, int]]:
    """What a write attempt that went through would change."""
    found = {}
    for path in [place, *place.rglob("*")]:
        status = path.lstat()
        found[str(path)] = status.st_mtime_ns, status.st_size, status.st_mode
    return found


@pytest.fixture(params=["closed", "killed"])
def filled(
    public: Path, server: ScriptedServer, children: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[tuple[Path, list[str], list[bytes]]]:
    """A root that an administrator filled, that nobody may write to and everybody may read."""
    if os.geteuid() != 0:
        pytest.skip("needs another user: root's modes stop root from nothing")
    place = public / "prefilled"
    bodies = [os.urandom(100_000), os.urandom(2 * MiB)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]

    def fill() -> None:
        with forebay.Cache(place) as cache:
            for url in urls:
                cache.read(url)
            cache.put("small", b"value")
            if request.param == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

    children(fill).wait()
    for path in [place, *place.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield place, urls, bodies
    with forebay.Cache(place) as cache:
        assert cache.check(deep=True) == []


def test_s31_hits_without_a_write(filled: Any, children: Callable[..., Any], server: ScriptedServer) -> None:
    place, urls, bodies = filled
    before, gets = picture(place), server.gets

    def reader() -> None:
        with forebay.Cache(place, read_only=True, max_age="forever") as cache:
            for _ in range(3):
                for url, body in zip(urls, bodies, strict=True):
                    assert cache.read(url) == body
                    with cache.open(url) as file:
                        assert file.read() == body
                    with cache.local(url) as path:
                        assert Path(path).is_relative_to(place)
            assert cache.get("small") == b"value"
            assert cache.put("new", b"value") is False
            assert len(cache.entries()) == 3

    for child in [children(reader, user=NOBODY) for _ in range(3)]:
        child.result()
    assert picture(place) == before
    assert server.gets == gets


def test_s31_misses_go_to_the_source(filled: Any, children: Callable[..., Any], server: ScriptedServer, warnings: Any) -> None:
    place, _, _ = filled
    url = server.put("/other.bin", b"other")

    def reader() -> list[str]:
        os.environ["NETRC"] = f"{place}.netrc"  # there is none
        with warnings() as said, forebay.Cache(place, read_only=True) as cache:
            for _ in range(3):
                assert cache.read(url) == b"other"
            assert cache.get_or_put("new", lambda: b"computed") == b"computed"
        return said

    assert len(children(reader, user=NOBODY).result()) <= 1


def test_s31_a_second_tier_that_can_be_written_to(filled: Any, children: Callable[..., Any], server: ScriptedServer, public: Path) -> None:
    place, urls, bodies = filled
    url = server.put("/other.bin", b"other" * 1000)
    mine = public / "mine"
    mine.mkdir()
    shutil.chown(mine, NOBODY, NOBODY)
    before, gets = picture(place), server.gets

    def reader() -> tuple[int, int]:
        with forebay.Cache(mine / "root", upstream=place, max_age="forever") as cache:
            for _ in range(2):
                for known, body in zip(urls, bodies, strict=True):
                    assert cache.read(known) == body
                assert cache.read(url) == b"other" * 1000
            with cache.local(urls[1]) as path:
                assert Path(path).read_bytes() == bodies[1]
            return len(cache.entries()), cache.stats().fallbacks

    assert children(reader, user=NOBODY).result() == (3, 0)
    assert server.gets == gets + 1
    assert picture(place) == before


def test_s31_an_upstream_that_grew_old_is_asked_for_once(
    filled: Any, children: Callable[..., Any], server: ScriptedServer, public: Path
) -> None:
    place, urls, bodies = filled
    mine = public / "mine"
    mine.mkdir()
    shutil.chown(mine, NOBODY, NOBODY)
    server.put("/0.bin", b"changed")
    gets, heads = server.gets, server.heads

    def reader() -> None:
        with forebay.Cache(mine / "root", upstream=place, max_age=0) as cache:
            assert cache.read(urls[0]) == b"changed"
            assert cache.read(urls[1]) == bodies[1]

    children(reader, user=NOBODY).result()
    assert server.gets == gets + 1
    assert server.heads >= heads + 2


def test_s31_somebody_begins_to_write(filled: Any, children: Callable[..., Any], server: ScriptedServer, flag: Callable[[], Any]) -> None:
    place, _, _ = filled
    opened, written = flag(), flag()

    def reader() -> None:
        with forebay.Cache(place, read_only=True) as cache:
            assert cache.get("later") is None
            opened.set()
            assert written.wait(60)
            assert cache.get("later") == b"seen"

    child = children(reader, user=NOBODY)
    assert opened.wait(60)
    with forebay.Cache(place) as cache:  # root's modes stop it from nothing
        cache.put("later", b"seen")
        for path in place.glob("catalog.sqlite-*"):
            path.chmod(0o444)
        written.set()
        child.result()


def test_s31_an_upstream_that_cannot_be_used_is_done_without(root: Path, tmp_path: Path, server: ScriptedServer, warnings: Any) -> None:
    url = server.put("/x.bin", b"data")
    upstream = tmp_path / "upstream"
    with forebay.Cache(upstream) as cache:
        cache.read(url)
    for path in upstream.glob("catalog.sqlite*"):
        path.write_bytes(b"not a catalog" * 1000)
    with warnings() as said, forebay.Cache(root, upstream=upstream) as cache:
        assert cache.read(url) == b"data"
        assert cache.read(url) == b"data"
    assert len(said) == 1
    assert str(upstream) in said[0]


def test_s31_not_read_only_it_is_refused_with_what_to_do(filled: Any, children: Callable[..., Any]) -> None:
    place, _, _ = filled

    def opener() -> str:
        with pytest.raises(forebay.errors.RootRefused) as caught:
            forebay.Cache(place)
        return str(caught.value)

    said = children(opener, user=NOBODY).result()
    assert str(place) in said


def test_s31_the_command_line_looks_at_it(filled: Any, children: Callable[..., Any]) -> None:
    """In a child of this process: another user may not be allowed to start this interpreter."""
    place, urls, _ = filled

    def look() -> tuple[int, list[str]]:
        os.environ["HOME"] = "/nonexistent"
        with contextlib.redirect_stdout(io.StringIO()) as told:
            code = main.run(["ls", "--quiet", "--root", str(place)])
        return code, told.getvalue().split()

    assert children(look, user=NOBODY).result() == (0, sorted([*urls, "values:small"]))


def without_asking(place: Path, urls: list[str], bodies: list[bytes]) -> None:
    """What a plain open of a root gives that this process may not write to."""
    for limits in ({}, {"budget": 99 * MiB}):
        with forebay.Cache(place, **limits) as cache:  # type: ignore[arg-type]
            assert [cache.read(url) for url in urls[:2]] == bodies[:2]
            assert cache.get("small") == b"value"
            with cache.local(urls[1]) as path:
                assert Path(path).read_bytes() == bodies[1]
            assert cache.read(urls[2]) == bodies[2]  # of the source
            assert cache.put("new", b"value") is False
            assert len(cache.entries()) == 3


@pytest.mark.root
@pytest.mark.parametrize("how", ["its modes", "the mount"])
def test_s31_a_root_of_ones_own_that_may_not_be_written_to_is_read_without_being_asked(
    public: Path, tmpfs: Callable[[str], Path], server: ScriptedServer, children: Callable[..., Any], how: str, warnings: Any
) -> None:
    place = public / "own" / "root" if how == "its modes" else tmpfs("64m") / "root"
    place.parent.mkdir(exist_ok=True)
    bodies = [os.urandom(100_000), os.urandom(2 * MiB), os.urandom(1000)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    uid = NOBODY if how == "its modes" else 0
    os.chown(place.parent, uid, uid)

    def fill() -> None:
        with forebay.Cache(place) as cache:
            for url in urls[:2]:
                cache.read(url)
            cache.put("small", b"value")
        if how == "its modes":
            for path in [place, *place.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)

    def look() -> list[str]:
        with warnings() as said:
            without_asking(place, urls, bodies)
        return list(said)

    children(as_user(uid, fill)).result()
    if how == "the mount":
        subprocess.run(["mount", "-o", "remount,ro", place.parent], check=True)
    gets, before = server.gets, picture(place)
    said = children(as_user(uid, look)).result()
    assert any("is not writable" in word for word in said)
    assert server.gets == gets + 2
    assert picture(place) == before
