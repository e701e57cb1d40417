"""Objects of a remote that tests of prefetchers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import forebay
from forebay._engine.store import Store
from forebay.testing import ScriptedServer

NAMES = [f"{number}.bin" for number in range(20)]
SIZE = 100_000


def body(name: str, size: int = SIZE) -> bytes:
    return (name.encode() * (size // len(name) + 1))[:size]


def put(server: ScriptedServer, names: list[str] = NAMES, size: int = SIZE, **how: Any) -> str:
    for name in names:
        server.put(f"/d/{name}", body(name, size), **how)
    return f"{server.url}/d"


def assert_a_cache_that_fails_fails_no_item(
    cache: forebay.Cache, pool: Any, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]
) -> None:
    """``broken``: in the place of `Store.take_many`, for a while."""
    monkeypatch.setattr(Store, "take_many", broken)
    lazies = [pool.get_lazy(name) for name in NAMES]
    assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
    assert cache.stats().fallbacks > 0
    monkeypatch.undo()
    assert pool.warm(NAMES).failed == ()
