"""A process that has as many mappings as `vm.max_map_count` allows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import forebay
from forebay._kernel import mappings
from forebay.testing import ScriptedServer
from tests.harness import MiB


def test_read_copies_what_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer() as server, forebay.Cache(tmp_path / "root", budget=64 * MiB) as cache:
        url = server.put("/object", bytes(range(256)) * 8192)
        cache.read(url)
        real = mappings.map_file

        def map_file(fd: int, length: int, **options: bool) -> memoryview:
            if length > MiB and not options.get("writable"):
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return real(fd, length, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(mappings, "map_file", map_file)
        requests = len(server.requests)
        for _ in range(2):
            with forebay.Cache(cache.path) as other:
                other._fetcher.store.engine.memo.restart(other._fetcher.store.engine.index)  # type: ignore[union-attr]
                assert bytes(other.read(url)) == bytes(range(256)) * 8192
        assert len(server.requests) == requests
