"""A process is stopped (Ctrl-Z, a debugger, a frozen container) while it has the catalog's writer lock: what the others then do."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import waits
from forebay.testing import ScriptedServer
from tests.harness import writer_lock
from tests.processes import Child, Gate, end, fork, in_child
from tests.remote_directories import http_directory

BODY = b"body" * 30_000


class Source:
    uri, version = "here://source", "1"

    def __getitem__(self, key: str) -> bytes:
        return b"item"


@pytest.fixture
def url(server: ScriptedServer) -> str:
    return server.put("/x", BODY)


@pytest.fixture
def stopped(root: Path, url: str) -> Iterator[Child]:
    """A root with something of each kind, and the process that is stopped inside its writer lock."""
    with forebay.Cache(root, budget=64 << 20) as cache:
        cache.put("k", b"value")
        cache.read(url)
        cache.space("s").put("k", b"in a space")
        cache.tasks("t").write("tag", [1, 2])
        cache.samples("array", 4).put(0, b"sample")
        with cache.prefetcher(Source()) as pool:
            assert pool.get_lazy("a").get() == b"item"
    said = Gate()

    def hold() -> None:
        with writer_lock(root):
            said.open()
            os.kill(os.getpid(), signal.SIGSTOP)

    child = fork(hold)
    said.wait()
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    yield child
    child.kill()
    said.close()


def test_a_hit_needs_no_writer_in_a_young_process_either(root: Path, url: str, stopped: Child) -> None:
    def young() -> None:
        with forebay.Cache(root, timeout=0.1) as cache:  # a call that waited for the lock would be refused
            assert cache.get("k") == b"value"
            assert cache.read(url) == BODY
            with cache.local(url) as path:
                assert Path(path).read_bytes() == BODY
            with cache.open(url) as file:
                assert file.read() == BODY
            assert cache.pull(url) is not None
            tasks = cache.tasks("t")
            assert tasks.read("tag") == (True, [1, 2])
            assert cache.space("s").get("k") == b"in a space"
            assert cache.samples("array", 4).get(0) == b"sample"
            with cache.prefetcher(Source()) as pool:
                assert pool.get_lazy("a").get() == b"item"
            stats = cache.stats()
            assert stats.entries == len(cache.entries()) == 6
            assert stats.fallbacks == stats.store_failures == 0
            assert stats.hits >= 7

    in_child(young)
    (root / "shared" / "keys").unlink()  # then the catalog is asked
    in_child(young)


def test_who_writes_waits_once_and_is_told_who_it_is(root: Path, url: str, stopped: Child) -> None:
    def other() -> None:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("forebay").addHandler(handler)
        with forebay.Cache(root, timeout=0.3) as cache:
            with pytest.raises(errors.WriterBusy, match=rf"process {stopped.pid} .*continue that process, or end it") as found:
                cache.pin(url)
            assert 0.2 < found.value.waited < 10
            assert f"process {stopped.pid} " in found.value.holder
            assert pickle.loads(pickle.dumps(found.value)).holder == found.value.holder
            for remove in (lambda: cache.evict(url), lambda: cache.evict("values:k"), cache.reset_stats, cache.clear().execute):
                with pytest.raises(errors.WriterBusy, match=rf"process {stopped.pid} ") as found:
                    remove()
                assert found.value.waited == 0
            assert not cache.put("new", b"x")
            assert cache.get_or_put("newer", lambda: b"made") == b"made"
            tasks = cache.tasks("new tasks", budget=1 << 20)
            assert not tasks.write("tag", 1)
            assert tasks.cached(lambda x: x + 1, tag="f-{x}")(1) == 2
            assert not cache.space("new space", quota=1 << 20).put("k", b"x")
            assert cache.samples("new array", 4).get_or_put(0, lambda: b"made") == b"made"
            with cache.prefetcher(Source(), name="new pool") as pool:
                assert pool.get_lazy("a").get() == b"item"
            assert cache.read(url) == BODY
            assert cache.stats().store_failures >= 4
            end(stopped.pid, signal.SIGCONT)
            assert cache.put("new", b"x")
            assert tasks.write("tag", 1)
            assert tasks.budget == 1 << 20
            cache.pin(url)
        assert sum("new tasks" in line for line in lines) <= 3, lines

    in_child(other)


@pytest.mark.parametrize("again", [{}, {"min_free": 12345}], ids=["", "with another limit"])
def test_a_budget_is_set_at_once_though_nothing_can_be_written(root: Path, url: str, stopped: Child, again: dict[str, int]) -> None:
    """Whatever else the process opens meanwhile: the settings are not in the catalog."""

    def other() -> None:
        with forebay.Cache(root, budget=70 << 20, timeout=0.1) as cache, forebay.Cache(root, timeout=0.1, **again):
            assert cache.get("k") == b"value"
            assert cache.budget == 70 << 20
            assert not cache.put("new", b"x")
            end(stopped.pid, signal.SIGCONT)
            assert cache.put("new", b"x")
            assert cache.budget == 70 << 20

    in_child(other)


CALLS: dict[str, Callable[[forebay.Cache, str], bool]] = {
    "read": lambda cache, base: cache.read(f"{base}/new") == BODY,
    "open": lambda cache, base: cache.open(f"{base}/new").read() == BODY,
    "directory": lambda cache, base: bool(cache.directory(f"{base}/run/step_100/")),
    "put": lambda cache, base: not cache.put("new", b"x"),
    "get_or_put": lambda cache, base: cache.space("s").get_or_put("new", lambda: b"made") == b"made",
    "a cached call": lambda cache, base: cache.tasks("t").cached(lambda x: x + 1, tag="f-{x}")(1) == 2,
    "a lazy": lambda cache, base: cache.prefetcher(Source()).get_lazy("new").get() == b"item",
}


@pytest.mark.rotates
@pytest.mark.parametrize("name", CALLS)
def test_all_that_a_call_waits_for_shares_its_timeout(root: Path, server: ScriptedServer, stopped: Child, name: str) -> None:
    """Not 10 s for each of a registration, a reservation and a publication. What counts is what it waits for in vain, not what a machine
    that does other things adds."""
    server.put("/new", BODY)
    http_directory(server, {"a": b"a", "b": BODY})

    def other() -> None:
        in_vain: list[float] = []
        wait_for = waits.wait_for

        def waiting(*args: Any, timeout: float, **how: Any) -> Any:
            try:
                return wait_for(*args, timeout=timeout, **how)
            except errors.WaitTimeout:
                in_vain.append(timeout)
                raise

        waits.wait_for = waiting
        with forebay.Cache(root, timeout=0.5) as cache:
            with pytest.raises(errors.CacheFault) if name == "directory" else contextlib.nullcontext():  # there is no other way to a path
                assert CALLS[name](cache, server.url)
            assert in_vain or name == "a lazy"  # it reads from its source, and what it keeps can wait
            assert sum(in_vain) <= 0.5, in_vain

    in_child(other)


def test_a_call_of_its_own_has_its_own_patience() -> None:
    limit = waits.time_limit
    with limit(2.0):
        assert limit.remaining() == 2.0
        with limit(None):
            limit.spend(0.5)
        assert limit.remaining() == 1.5
        with limit(1.0):
            limit.spend(0.25)
            assert limit.remaining() == 0.75
        assert limit.remaining() == 1.25
        with limit(None, afresh=True):
            limit.spend(100)
            assert limit.remaining() > 1000
        with limit(5.0):
            assert limit.remaining() == 1.25
            limit.spend(3.0)
            assert limit.remaining() == 0
        assert limit.remaining() == 0
    assert limit.remaining() > 1000
