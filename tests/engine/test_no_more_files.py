"""A process that can open no more files, on a machine that has none left: every call gives its answer or a typed error, and the cache goes
on once there are files again."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from tests.processes import in_child

CALLS: dict[str, Callable[[forebay.Cache, Path], Any]] = {
    "stats": lambda cache, near: cache.stats(),
    "entries": lambda cache, near: cache.entries(),
    "entry": lambda cache, near: cache.entry("large1"),
    "hold": lambda cache, near: cache.hold(str(near)),
    "check": lambda cache, near: cache.check(),
    "deep check": lambda cache, near: cache.check(deep=True),
    "plan": lambda cache, near: cache.plan("499MB"),
    "pin": lambda cache, near: cache.pin("large1"),
    "unpin": lambda cache, near: cache.unpin("large1"),
    "evict": lambda cache, near: cache.evict("large2"),
    "remove": lambda cache, near: cache.plan(where=lambda entry: "large3" in entry.key).execute(),
    "prune": lambda cache, near: cache.prune().execute(),
    "repair": lambda cache, near: cache.repair(),
    "reset": lambda cache, near: cache.reset_stats(),
    "space": lambda cache, near: cache.space("new", quota=100),
    "get": lambda cache, near: cache.get("large4"),
    "put": lambda cache, near: cache.put("more", b"x"),
    "read": lambda cache, near: cache.read(f"file://{near}", force=True) and None,
    "open": lambda cache, near: forebay.Cache(cache.path).close(),
    "look": lambda cache, near: forebay.Cache(cache.path, read_only=True).close(),
    "make": lambda cache, near: forebay.Cache(cache.path.parent / "new").close(),
    "claims": lambda cache, near: forebay.list_claims(),
    "prune claims": lambda cache, near: forebay.prune_claims(),
    "clear": lambda cache, near: cache.clear().execute(),
}


NEVER_REFUSED = {"stats", "get", "put", "read", "open"}


@contextmanager
def no_more_files(left: int) -> Iterator[None]:
    """Of this process's descriptors all are taken but ``left``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, hard))
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    (tmp_path / "near").write_bytes(bytes(50_000))
    return tmp_path / "near"


def fill(cache: forebay.Cache, near: Path) -> None:
    for number in range(6):
        cache.put(f"large{number}", bytes([number]) * 40_000)
    cache.pull(near)


def load_all(root: Path, near: Path) -> None:
    """Make each call once, with descriptors: Python itself cannot import without one."""
    with forebay.Cache(root, budget=500_000_000, min_free=0) as cache:
        fill(cache, near)
        for call in CALLS.values():
            call(cache, near)


def refusal(call: Callable[[forebay.Cache, Path], Any], cache: forebay.Cache, near: Path) -> errors.ForebayError | None:
    try:
        call(cache, near)
    except errors.ForebayError as error:
        return error
    return None


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("fresh", [True, False])
def test_each_call_without_files(tmp_path: Path, near: Path, fresh: bool, left: int) -> None:
    in_child(lambda: each_call(tmp_path, near, fresh, left))  # whatever else has descriptors in this process goes on


def each_call(tmp_path: Path, near: Path, fresh: bool, left: int) -> None:
    load_all(tmp_path / "other", near)
    with forebay.claim(tmp_path / "data"), forebay.Cache(tmp_path / "root", budget=500_000_000, min_free=0) as filler:
        fill(filler, near)
        if fresh:
            filler.close()
        with forebay.Cache(tmp_path / "root") as cache:
            for name, call in CALLS.items():
                with no_more_files(left):
                    refused = refusal(call, cache, near)
                mere = name == "read" and not left  # nor could its source be opened without a cache
                assert refused is None or mere or name not in NEVER_REFUSED, (name, refused)
                assert refused is None or isinstance(refused, (errors.CacheFault, errors.RootError, errors.RemoteError)), (name, refused)
                if name == "evict":
                    assert cache.entry("large5") is not None
            fill(cache, near)
            assert len(cache.entries()) >= 7
            assert cache.check(deep=True) == []


def test_statistics_that_cannot_be_read_are_zeros(tmp_path: Path) -> None:
    """Where the catalog has to be opened anew, as after others left this process behind with an old log."""

    def look() -> None:
        with forebay.Cache(tmp_path / "root", budget=500_000_000, min_free=0) as cache:
            cache.put("k", b"value")
            cache.stats()
            cache._store.engine.parts.catalog.close()  # type: ignore[union-attr]
            with no_more_files(0):
                stats = cache.stats()
            assert (stats.entries, stats.hits, stats.budget) == (0, 0, 0)
            assert cache.stats().entries == 1

    in_child(look)


@pytest.mark.parametrize("number", [errno.ENFILE, errno.EMFILE, errno.ENOMEM])
def test_a_machine_without_files_refuses_no_job(tmp_path: Path, near: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **how: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        cache = forebay.Cache(tmp_path / "root", budget=500_000_000)
    assert bytes(cache.read(near)) == bytes(50_000)
    cache.close()
