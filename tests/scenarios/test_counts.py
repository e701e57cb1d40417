"""What processes do is counted, whatever calls they make, however short they live and however they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.processes import fork, in_child

BODY = b"body" * 10_000


def pulls(cache: forebay.Cache, url: str) -> None:
    for _ in range(20):
        cache.pull(url)


def warms(cache: forebay.Cache, url: str) -> None:
    cache.warm([url] * 20)


def opens(cache: forebay.Cache, url: str) -> None:
    for _ in range(20):
        cache.open(url).close()


def locals_(cache: forebay.Cache, url: str) -> None:
    for _ in range(20):
        with cache.local(url):
            pass


def reads(cache: forebay.Cache, url: str) -> None:
    for _ in range(20):
        cache.read(url)


def gets(cache: forebay.Cache, url: str) -> None:
    for _ in range(20):
        cache.get("k")


ACTS = [pulls, warms, opens, locals_, reads, gets]


@pytest.mark.parametrize(
    ("act", "end"),
    [*((act, "kill") for act in ACTS), *((reads, end) for end in ("close", "exit", "no close"))],
    ids=lambda each: each if isinstance(each, str) else each.__name__.rstrip("_"),
)
def test_every_hit_of_every_process_is_counted(
    root: Path, server: ScriptedServer, act: Callable[[forebay.Cache, str], None], end: str
) -> None:
    url = server.put("/x", BODY)

    def work() -> None:
        if end == "close":
            with forebay.Cache(root) as mine:
                act(mine, url)
            return
        mine = forebay.Cache(root)
        act(mine, url)
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "exit":
            os._exit(0)

    with forebay.Cache(root) as cache:
        cache.read(url)
        cache.put("k", b"value")
        cache.reset_stats()
        for _ in range(2):
            fork(work).wait()
        assert (cache.stats().hits, cache.stats().misses) == (40, 0)
    assert in_child(lambda: forebay.Cache(root).stats().hits) == 40


def test_a_child_counts_for_itself_and_the_parent_too(root: Path) -> None:
    with forebay.Cache(root) as cache:
        cache.put("k", b"value")
        assert cache.get("k") is not None
        in_child(lambda: [cache.get("k") for _ in range(10)] and None)
        assert cache.get("k") is not None
        assert cache.stats().hits == 12
        cache.reset_stats()
        assert cache.stats().hits == 0
        in_child(lambda: cache.get("k") and None)
        assert cache.stats().hits == 1


def test_many_short_processes_share_few_pages(root: Path) -> None:
    with forebay.Cache(root) as cache:
        cache.put("k", b"value")
    for _ in range(30):
        in_child(lambda: forebay.Cache(root).get("k") and None)
    assert (root / "counters").stat().st_size == 64 * 4096
    with forebay.Cache(root) as cache:
        assert cache.stats().hits == 30
