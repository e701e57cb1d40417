"""Signals wait in what an event loop runs, too: tasks and callbacks."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import forebay
from forebay._engine.flight import KeyHold
from forebay.cache import aio
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.interrupts.every_line import held_locks
from tests.interrupts.signals import NUMBER, handler_that_raises, interrupted_after


@pytest.mark.parametrize("kind", [TimeoutError, SystemError, type("Limit", (BaseException,), {})])
def test_aget_or_put_raises_what_a_handler_did_and_keeps_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    with forebay.Cache(tmp_path / "root", budget=32 * MiB) as cache:
        cache.get_or_put("before", lambda: b"x" * 30_000)
        held, ran = held_locks(), list[str]()

        async def make() -> bytes:
            ran.append("make")
            return b"x" * 30_000

        with handler_that_raises(kind), monkeypatch.context() as patch, pytest.raises(kind, match="of the handler"):
            interrupted_after(patch, KeyHold, "try_take")
            asyncio.run(_awaited(cache.aget_or_put("k", make)))
        assert held_locks() == held
        assert not ran
        assert cache.get_or_put("k", lambda: b"later", timeout=0) == b"later"


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


@pytest.mark.parametrize("call", ["aread", "alocal", "in_thread"])
def test_a_call_ends_if_a_handler_raises_in_the_callback_that_settles_it(tmp_path: Path, call: str) -> None:
    told = list[Any]()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "settle" and frame.f_code.co_filename == aio.__file__:
            sys.settrace(None)
            told.append("settle")
            signal.raise_signal(NUMBER)

    async def main(cache: forebay.Cache, url: str) -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        if call == "in_thread":
            return await asyncio.wait_for(aio.in_thread(lambda: b"x" * 30_000), 60)
        if call == "aread":
            return await asyncio.wait_for(cache.aread(url), 60)
        async with cache.alocal(url) as path:
            return Path(path).read_bytes()

    with ScriptedServer() as server, forebay.Cache(tmp_path / "root", budget=32 * MiB) as cache, handler_that_raises():
        sys.settrace(trace)
        try:
            assert asyncio.run(main(cache, server.put("/x", b"x" * 30_000))) == b"x" * 30_000
        finally:
            sys.settrace(None)
    assert [told[0], *map(type, told[1:])] == ["settle", TimeoutError]
