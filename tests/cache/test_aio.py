"""The asynchronous calls: `aread`, `alocal`, `aopen`, `aget_or_put`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.testing import Request, ScriptedServer
from tests.items import until
from tests.processes import Line, in_child, talk_to


def test_what_is_awaited_together_is_fetched_side_by_side_and_once(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = [os.urandom(size) for size in [10, 20_000, 300_000, 1_500_000] * 10]
    urls = [server.put(f"/{number}", body) for number, body in enumerate(bodies)]
    threads: set[int] = set()

    async def read_all() -> list[memoryview]:
        found = await asyncio.gather(*(cache.aread(url) for url in urls * 2))
        threads.add(threading.active_count())
        return found

    assert [bytes(view) for view in asyncio.run(read_all())] == bodies * 2
    assert len({request.path for request in server.requests}) == len(urls)
    assert cache.stats().fills == len(urls)
    before = server.gets
    assert [bytes(view) for view in asyncio.run(read_all())] == bodies * 2
    assert server.gets == before


def test_a_cancelled_call_cancels_nothing_for_the_others(cache: forebay.Cache, server: ScriptedServer) -> None:
    """Neither for one that waits for the same object, nor for one that waits for another."""
    urls = [server.put(f"/{name}", name.encode() * 50_000, stall_after=100, stalls=1) for name in "xy"]

    async def main() -> list[memoryview]:
        first = asyncio.create_task(cache.aread(urls[0]))
        await asyncio.to_thread(server.stalled.wait, 60)
        others = [asyncio.create_task(cache.aread(url)) for url in urls]
        await asyncio.to_thread(until, lambda: server.gets == 2, "the second request")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        server.go.set()
        return await asyncio.gather(*others)

    assert asyncio.run(main()) == [b"x" * 50_000, b"y" * 50_000]
    assert server.gets == 2


def test_what_nobody_awaits_any_more_is_kept_all_the_same(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/slow", b"x" * 50_000, stall_after=100, stalls=1)

    async def main() -> None:
        task = asyncio.create_task(cache.aread(url))
        await asyncio.to_thread(server.stalled.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    server.go.set()
    assert cache.read(url) == b"x" * 50_000  # waits for the one that fetches it
    assert server.gets == 1


def test_errors_reach_the_coroutine(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/there", b"there")

    async def main() -> list[object]:
        return await asyncio.gather(cache.aread(url), cache.aread(f"{server.url}/not"), cache.aread("what://x"), return_exceptions=True)

    there, missing, unknown = asyncio.run(main())
    assert there == b"there"
    assert isinstance(missing, errors.NotFound)
    assert isinstance(unknown, errors.ConfigError | errors.MissingExtra)


def test_local_copies(cache: forebay.Cache, server: ScriptedServer, tmp_path: Path) -> None:
    url = server.put("/a.bin", b"a" * 20_000)
    (tmp_path / "own").write_bytes(b"own")

    async def main() -> None:
        async with cache.alocal(url) as path:
            assert Path(path).read_bytes() == b"a" * 20_000
            assert not cache.evict(url).removed
        assert cache.evict(url).removed
        lease = await cache.alocal(url)
        assert Path(lease.path).read_bytes() == b"a" * 20_000
        lease.close()
        async with cache.alocal(tmp_path / "own") as path:
            assert path == str(tmp_path / "own")

    asyncio.run(main())


def test_the_lease_of_a_cancelled_call_is_released(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/slow", b"x" * 50_000, stall_after=100, stalls=1)

    async def take() -> None:
        await cache.alocal(url)

    async def main() -> None:
        task = asyncio.create_task(take())
        await asyncio.to_thread(server.stalled.wait, 60)
        task.cancel()
        server.go.set()
        assert await cache.aread(url) == b"x" * 50_000

    asyncio.run(main())
    assert cache.evict(url).removed


def test_files(tmp_path: Path, server: ScriptedServer) -> None:
    small, large = server.put("/small", b"s" * 1000), server.put("/large", bytes(2_000_000))
    (tmp_path / "own").write_bytes(b"own")

    async def main(cache: forebay.Cache) -> None:
        with await cache.aopen(small) as file:
            assert file.read() == b"s" * 1000
        with await cache.aopen(large) as file:
            file.seek(1_999_990)
            assert file.read() == bytes(10)
        with await cache.aopen(tmp_path / "own") as file:
            assert file.read() == b"own"
        with pytest.raises(errors.NotFound):
            await cache.aopen(f"{server.url}/not")

    with forebay.Cache(tmp_path / "root", budget=500_000, min_free=0) as cache:
        asyncio.run(main(cache))


def test_the_loop_goes_on_while_another_process_fetches(tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/slow", b"x" * 50_000, stall_after=100, stalls=1)

    def reader(line: Line) -> None:
        with forebay.Cache(tmp_path / "root") as cache:
            cache.read(url)

    async def main(cache: forebay.Cache) -> bytes:
        task = asyncio.create_task(cache.aread(url))
        while cache.stats().waits == 0:
            await asyncio.sleep(0)  # the loop turns
        server.go.set()
        return bytes(await task)

    with forebay.Cache(tmp_path / "root") as cache, talk_to(reader) as other:
        assert server.stalled.wait(60)
        assert asyncio.run(main(cache)) == b"x" * 50_000
        other.result()
    assert server.gets == 1


def test_loops_of_several_threads(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}", b"%d" % number) for number in range(40)]
    found: list[list[bytes]] = []

    async def main() -> list[bytes]:
        return [bytes(view) for view in await asyncio.gather(*map(cache.aread, urls))]

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(main()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[b"%d" % number for number in range(40)]] * 4
    assert server.gets == 40


def test_a_forked_child_awaits_on_its_own(cache: forebay.Cache, server: ScriptedServer) -> None:
    first, second = server.put("/1", b"1"), server.put("/2", b"2")

    async def read(url: str) -> bytes:
        return bytes(await cache.aread(url))

    assert asyncio.run(read(first)) == b"1"
    assert in_child(lambda: asyncio.run(read(second))) == b"2"
    assert asyncio.run(read(second)) == b"2"
    assert server.gets == 2


def test_without_a_cache_and_after_its_end(tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/1", b"1")

    async def read(cache: forebay.Cache) -> bytes:
        return bytes(await cache.aread(url))

    with forebay.Cache(enabled=False) as cache:
        assert asyncio.run(read(cache)) == b"1"
    with pytest.raises(errors.Closed):
        asyncio.run(read(cache))


# -- aget_or_put -------------------------------------------------------------------------------------------------------


def test_one_coroutine_makes_a_value_and_all_get_it(cache: forebay.Cache) -> None:
    calls: list[int] = []

    async def make() -> bytes:
        calls.append(1)
        await asyncio.sleep(0)
        return b"made"

    async def main() -> list[memoryview]:
        return await asyncio.gather(*(cache.aget_or_put("key", make) for _ in range(20)))

    assert asyncio.run(main()) == [b"made"] * 20
    assert len(calls) == 1
    assert cache.get("key") == b"made"


@pytest.mark.parametrize("returns", [lambda: b"made", lambda: asyncio.sleep(0, b"made")], ids=["bytes", "an awaitable"])
def test_a_plain_function_runs_in_a_thread(returns: Callable[[], bytes], cache: forebay.Cache) -> None:
    threads: list[int] = []

    def make() -> bytes:
        threads.append(threading.get_ident())
        return returns()

    async def main() -> memoryview:
        return await cache.aget_or_put("key", make)

    assert asyncio.run(main()) == b"made"
    assert threads
    assert threads[0] != threading.get_ident()


def test_a_cancelled_maker_makes_it_for_the_others(cache: forebay.Cache) -> None:
    calls: list[int] = []

    async def main() -> memoryview:
        begun, go = asyncio.Event(), asyncio.Event()

        async def make() -> bytes:
            calls.append(1)
            begun.set()
            await go.wait()
            return b"made"

        first = asyncio.create_task(cache.aget_or_put("key", make))
        await begun.wait()
        second = asyncio.create_task(cache.aget_or_put("key", make))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        return await second

    assert asyncio.run(main()) == b"made"
    assert len(calls) == 1


def test_what_the_function_raises_reaches_the_caller(cache: forebay.Cache) -> None:
    async def make() -> bytes:
        raise KeyError("mine")

    async def main() -> None:
        with pytest.raises(KeyError):
            await cache.aget_or_put("key", make)
        assert await cache.aget_or_put("key", lambda: b"next") == b"next"

    asyncio.run(main())


def test_a_value_without_room_is_returned(tmp_path: Path) -> None:
    async def main(cache: forebay.Cache) -> memoryview:
        return await cache.aget_or_put("key", lambda: bytes(300_000))

    with forebay.Cache(tmp_path / "root", budget=100_000, min_free=0) as cache:
        assert asyncio.run(main(cache)) == bytes(300_000)
    with forebay.Cache(enabled=False) as cache:
        assert asyncio.run(main(cache)) == bytes(300_000)


def test_a_failure_reaches_all_coroutines_that_wait_for_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    last = server.put("/last", b"last")

    def answer(request: Request) -> None:
        """The answer for what is missing comes when the object that was awaited last is requested: all before it are waited for then."""
        if request.path == "/last":
            server.go.set()
        else:
            server.go.wait(60)

    server.on_request = answer

    async def main() -> list[object]:
        return await asyncio.gather(*(cache.aread(url) for url in [f"{server.url}/missing"] * 20 + [last]), return_exceptions=True)

    *failed, read = asyncio.run(main())
    assert {type(error) for error in failed} == {errors.NotFound}
    assert (read, server.gets) == (b"last", 2)


def test_hits_and_local_files_do_not_wait_behind_objects_that_stall(
    cache: forebay.Cache, server: ScriptedServer, tmp_path: Path
) -> None:  # fmt: skip
    stalled = [server.put(f"/{number}", b"z" * 1000, stall_after=10) for number in range(20)]
    hit = server.put("/hit", b"hit")
    (tmp_path / "own").write_bytes(b"own")
    cache.read(hit)

    async def main() -> None:
        waiting = [asyncio.create_task(cache.aread(url)) for url in stalled]
        await asyncio.to_thread(server.stalled.wait, 60)
        assert await cache.aread(hit, max_age="forever") == b"hit"
        async with cache.alocal(hit) as path:
            assert Path(path).read_bytes() == b"hit"
        assert await cache.aread(tmp_path / "own") == b"own"
        server.go.set()
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_an_event_loop_that_is_closed_in_the_middle_of_a_call(cache: forebay.Cache, server: ScriptedServer) -> None:
    urls = [server.put(f"/{number}", b"x" * 50_000, stall_after=100, stalls=1) for number in range(2)]

    async def take() -> None:
        await cache.alocal(urls[0])

    async def begin() -> list[asyncio.Task[object]]:
        tasks: list[asyncio.Task[object]] = [asyncio.ensure_future(take()), asyncio.ensure_future(cache.aread(urls[1]))]
        await asyncio.to_thread(server.stalled.wait, 60)
        return tasks

    async def read_all() -> list[memoryview]:
        return await asyncio.gather(*map(cache.aread, urls))

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(begin())
    loop.close()
    server.go.set()
    assert asyncio.run(read_all()) == [b"x" * 50_000] * 2
    assert not any(task.done() for task in tasks)
    assert server.gets == 2
    deadline = time.monotonic() + 60
    while not cache.evict(urls[0]).removed:  # no lease is left
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_no_thread_can_be_started_the_event_loop_waits_for_the_object(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, start = server.put("/1", b"1"), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "forebay-async":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def read() -> list[object]:
        return await asyncio.gather(cache.aread(url), cache.aread(f"{url}#2"), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert asyncio.run(read()) == [b"1", b"1"]
    assert asyncio.run(read()) == [b"1", b"1"]


def test_all_threads_of_the_loop_may_wait_for_the_value_that_a_coroutine_makes(cache: forebay.Cache) -> None:
    async def main() -> list[memoryview]:
        begun, go = asyncio.Event(), asyncio.Event()

        async def make() -> bytes:
            begun.set()
            await go.wait()
            return b"made"

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        first = asyncio.create_task(cache.aget_or_put("key", make))
        await begun.wait()
        others = [asyncio.create_task(asyncio.to_thread(cache.get_or_put, "key", lambda: b"other")) for _ in range(4)]
        go.set()
        return [await first, *await asyncio.gather(*others)]

    assert asyncio.run(main()) == [b"made"] * 5
