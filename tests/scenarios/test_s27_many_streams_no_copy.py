"""Scenario 27: one object comes by several ranges at once, and a hit copies nothing. (Rates are measured by the benchmarks.)"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def test_s27_four_ranges_are_under_way_at_once(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(12 * MiB)
    url = server.put("/x.bin", body)
    together = threading.Barrier(4)
    broken: list[bool] = []

    def meet(request: Any) -> None:
        # The first question is for the first part, the next three are asked while its answer is on the way.
        if 1 < server.gets <= 4:
            try:
                together.wait(30)
            except threading.BrokenBarrierError:
                broken.append(True)

    server.on_request = meet
    server.objects["/x.bin"].stall_after = 100_000
    server.objects["/x.bin"].stalls = 1
    options = forebay.RemoteOptions(part=2 * MiB, streams=4)

    def let_go() -> None:
        try:
            together.wait(30)
        finally:
            server.go.set()

    watcher = threading.Thread(target=let_go)
    watcher.start()
    with forebay.Cache(root, remote_options=options) as cache:
        assert cache.read(url) == body
    watcher.join()
    assert not broken
    assert server.gets == 6
    assert server.sent == len(body)


def address(buffer: memoryview) -> int:
    return ctypes.cast(ctypes.py_object(buffer), ctypes.c_void_p).value or 0


def test_s27_a_hit_is_a_mapping_or_a_path(root: Path, server: ScriptedServer) -> None:
    np = __import__("pytest").importorskip("numpy")
    body = os.urandom(8 * MiB)
    url = server.put("/x.bin", body)
    with forebay.Cache(root) as cache:
        first, second = cache.read(url), cache.read(url)
        assert np.frombuffer(first, np.uint8).ctypes.data == np.frombuffer(second, np.uint8).ctypes.data
        assert first.readonly
        where = np.frombuffer(first, np.uint8).ctypes.data
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(root / "blobs") in line]
        spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
        assert any(low <= where < high for low, high in spans)  # over the file itself
        with cache.local(url) as path:
            assert Path(path).stat().st_size == len(body)
            assert Path(path).is_relative_to(root / "blobs")
        with cache.open(url) as file:
            assert os.fstat(file.fileno()).st_ino == Path(path).stat().st_ino
        del first, second, lines
