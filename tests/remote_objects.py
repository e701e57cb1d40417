"""Objects of a remote that tests of prefetchers share."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import forebay
from forebay.testing import ScriptedServer

NAMES = [f"{number}.bin" for number in range(20)]
SIZE = 100_000


def body(name: str, size: int = SIZE) -> bytes:
    return (name.encode() * (size // len(name) + 1))[:size]


def put(server: ScriptedServer, names: list[str] = NAMES, size: int = SIZE, **how: Any) -> str:
    for name in names:
        server.put(f"/d/{name}", body(name, size), **how)
    return f"{server.url}/d"


def assert_a_cache_that_fails_fails_no_item(cache: forebay.Cache, pool: Any, on_step: Any) -> None:
    """The disk refuses all writes, for a while."""

    def broken(call: str, subject: str) -> None:
        raise OSError(errno.EIO, "the disk went away")

    on_step(broken)
    lazies = [pool.get_lazy(name) for name in NAMES]
    assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
    assert cache.stats().fallbacks > 0
    on_step(None)
    assert pool.warm(NAMES).failed == ()


def connections(server: ScriptedServer) -> int:
    """How many clients have a connection to it that they have not closed. The kernel may list one twice, while others come and go."""
    port = f":{int(server.url.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return len({row[2] for row in rows if row[1].endswith(port) and row[3] == "01"})
