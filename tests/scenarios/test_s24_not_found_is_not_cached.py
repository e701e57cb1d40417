"""Scenario 24: a file that appears later is seen at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer


def test_s24_created_after_a_miss(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    url = server.url + "/later.bin"

    def in_another_process() -> bytes:
        with forebay.Cache(root) as cache:
            return bytes(cache.read(url))

    with forebay.Cache(root) as cache:
        for ask in (cache.read, cache.open, cache.local, cache.pull):
            with pytest.raises(forebay.errors.NotFound) as caught:
                ask(url)
            assert isinstance(caught.value, FileNotFoundError)
            assert url in str(caught.value)
        assert cache.entries() == []
        server.put("/later.bin", b"here it is")
        assert cache.read(url) == b"here it is"
    assert children(in_another_process).result() == b"here it is"


def test_s24_gone_and_back(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", b"one")
    with forebay.Cache(root, max_age=0) as cache:
        assert cache.read(url) == b"one"
        served = server.objects.pop("/x.bin")
        with pytest.raises(forebay.errors.NotFound):
            cache.read(url)
        server.objects["/x.bin"] = served
        assert cache.read(url) == b"one"


def test_s24_a_local_file(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "later.bin"
    with forebay.Cache(root) as cache:
        for how in ({}, {"force": True}):
            with pytest.raises(FileNotFoundError):
                cache.read(path, **how)
        path.write_bytes(b"here")
        assert cache.read(path) == b"here"
        assert cache.read(path, force=True) == b"here"


def test_s24_the_command_line(root: Path, server: ScriptedServer, command: Callable[..., Any]) -> None:
    missing = command("pull", "--root", root, server.url + "/later.bin")
    assert missing.returncode == 1
    assert "404" in missing.stderr
    server.put("/later.bin", b"here it is")
    assert command("pull", "--root", root, server.url + "/later.bin").returncode == 0
