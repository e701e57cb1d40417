"""What a handler raises in a hit, which runs without a guard, is no error of the disk: a time limit may be an OSError."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forebay
from forebay._engine.packs.pack import Pack
from forebay.adapters import pfio
from forebay.cache import fetcher_of
from tests.harness import MiB
from tests.interrupts.signals import NUMBER, handler_that_raises, interrupted_after


def test_writable_memory_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.Cache(tmp_path / "root", budget=32 * MiB, min_free=0) as cache:
        samples: Any = cache.samples("s", 3)
        assert samples.put(1, b"x" * MiB)
        codec = SimpleNamespace(name="", decode=lambda data, private: private())
        reader: Any = forebay.Samples(fetcher_of(cache), samples._pack, codec, "s")
        with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            interrupted_after(patch, Pack, "private")
            reader.get(1)
        assert reader.get(1) == b"x" * MiB


def test_a_slot_of_pfio(tmp_path: Path) -> None:
    class Interrupted:
        def get(self, i: int) -> Any:
            signal.raise_signal(NUMBER)
            return memoryview(b"x")

    files: Any = pfio.FileCache(1, dir=tmp_path / "pfio")
    assert files.put(0, b"x")
    live, files._source = files._source, Interrupted()
    with handler_that_raises(), pytest.raises(TimeoutError, match="of the handler"):
        files.get(0)
    files._source = live
    assert files.get(0) == b"x"
    files.close()
