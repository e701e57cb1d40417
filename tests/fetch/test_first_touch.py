"""The first reads of a young process: what the index of keys leads to is read without the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine.store import Store
from forebay.testing import ScriptedServer
from tests.processes import in_child

LARGE = bytes(range(256)) * 200

READS: dict[str, Callable[[forebay.Cache, str], bytes]] = {
    "read": lambda cache, url: bytes(cache.read(url)),
    "read_many": lambda cache, url: bytes(cache.read_many([url])[0]),
    "aread": lambda cache, url: bytes(asyncio.run(awaited(cache, url))),
    "get": lambda cache, url: bytes(cache.get("key") or b""),
    "tasks.read": lambda cache, url: bytes(cache.tasks("t").read("key")[1]),
}


async def awaited(cache: forebay.Cache, url: str) -> memoryview:
    return await cache.aread(url)


@pytest.mark.parametrize("read", list(READS))
def test_the_first_read_of_a_process_asks_the_index_alone(read: str, tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/large", LARGE)
    with forebay.Cache(tmp_path / "root", budget=64 << 20) as cache:
        cache.read(url)
        cache.put("key", LARGE)
        cache.tasks("t").write("key", LARGE)

    def look() -> tuple[bytes, list[str]]:
        calls: list[str] = []
        for name in ("view", "take_many", "lease", "entry"):
            setattr(Store, name, noting(getattr(Store, name), name, calls))
        with forebay.Cache(tmp_path / "root") as cache:
            return READS[read](cache, url), calls

    assert in_child(look) == (LARGE, [])
    assert server.gets == 1


def noting(method: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return method(*arguments, **named)

    return noted
