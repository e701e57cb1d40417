"""Scenario 29: each error survives pickling with its facts, so that a worker's failure is one and no hang. (A DataLoader: scenario 17; all
classes: test_errors.py.)"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer


def _read(handle: forebay.Cache, url: str) -> bytes:
    with handle.local(url) as path:
        return Path(path).read_bytes()


def test_s29_from_a_pool_of_processes(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", bytes(1 << 20))
    context = multiprocessing.get_context("fork")
    with forebay.Cache(root, budget=100_000) as cache, concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        with pytest.raises(errors.NoSpace) as full:
            pool.submit(cache_local, str(root), url).result(60)
        assert full.value.need == 1 << 20
        assert full.value.budget == 100_000
        with pytest.raises(FileNotFoundError) as missing:
            pool.submit(cache_local, str(root), url + ".gone").result(60)
        assert missing.value.url == url + ".gone"
        assert cache.entries() == []


def cache_local(root: str, url: str) -> bytes:
    with forebay.Cache(root) as cache:
        return _read(cache, url)


def test_s29_a_failure_that_was_waited_for_is_the_same_error(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    start = barrier(4)

    def rank() -> Exception:
        def fn() -> bytes:
            import time

            time.sleep(0.5)
            raise ValueError("the function's own", 42)

        with forebay.Cache(root) as cache:
            start.wait(60)
            try:
                cache.get_or_put("key", fn)
            except ValueError as error:
                return error
        raise AssertionError("no error")

    assert {child.result().args for child in [children(rank) for _ in range(4)]} == {("the function's own", 42)}
