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
from forebay._kernel import interrupts
from forebay._kernel.threads import in_thread
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


def calls_back(frame: FrameType) -> bool:
    """Whether this is the callback that gives a coroutine its result, or the guard around it."""
    code = frame.f_code
    guarded = frame.f_locals.get("function") if (code.co_name, code.co_filename) == ("call", interrupts.__file__) else None
    return "settle" in (code.co_name, getattr(guarded, "__name__", ""))


@pytest.mark.parametrize("call", ["aread", "alocal", "in_thread"])
def test_a_call_ends_if_a_handler_raises_in_the_callback_that_settles_it(tmp_path: Path, call: str) -> None:
    """At each opcode of the callback and of the guard around it, its first ones included, before signals wait."""
    told, at, seen = list[Any](), 0, 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not calls_back(frame):
            return None
        frame.f_trace_opcodes = True
        return strike

    def strike(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        seen += event == "opcode"
        if seen == at:
            sys.settrace(None)
            signal.raise_signal(NUMBER)
        return strike

    async def main(cache: forebay.Cache, url: str) -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        if call == "in_thread":
            return await asyncio.wait_for(in_thread(lambda: b"x" * 30_000), 20)
        if call == "aread":
            return await asyncio.wait_for(cache.aread(url), 20)
        lease = await asyncio.wait_for(cache.alocal(url), 20)
        with lease:
            return Path(lease.path).read_bytes()

    with ScriptedServer() as server, forebay.Cache(tmp_path / "root", budget=32 * MiB) as cache, handler_that_raises():
        while seen >= at:
            at, seen = at + 1, 0
            sys.settrace(trace)
            try:
                assert asyncio.run(main(cache, server.put(f"/{at}", b"x" * 30_000))) == b"x" * 30_000, f"at opcode {at}"
            finally:
                sys.settrace(None)
    assert at > 20
    assert [*map(type, told)] == [TimeoutError] * (at - 1)
