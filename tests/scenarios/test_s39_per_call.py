"""Scenario 39: bypass, force and pin, per call. (A YAML with patterns comes later.)"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


@pytest.mark.parametrize("how", ["read", "open"])
def test_s39_bypass_neither_reads_nor_writes(root: Path, server: ScriptedServer, how: str) -> None:
    url = server.put("/x.bin", b"first")

    def ask(cache: forebay.Cache, **more: Any) -> bytes:
        if how == "read":
            return bytes(cache.read(url, **more))
        with cache.open(url, **more) as file:
            return file.read()

    with forebay.Cache(root, max_age="forever") as cache:
        assert ask(cache, bypass=True) == b"first"
        assert cache.entries() == []
        assert ask(cache) == b"first"
        server.put("/x.bin", b"other")
        assert ask(cache, bypass=True) == b"other"
        assert ask(cache) == b"first"  # what is kept is as it was


def test_s39_a_local_file_is_opened_in_place_unless_forced(root: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    path = tmp_path / "on a network mount.bin"
    path.write_bytes(b"data" * 1000)
    with forebay.Cache(root) as cache:
        with cache.local(path) as found:
            assert os.fspath(found) == str(path)
        assert cache.read(path) == path.read_bytes()
        assert cache.entries() == []
        with cache.local(path, force=True) as found:
            assert Path(found).is_relative_to(root)
            assert Path(found).read_bytes() == path.read_bytes()
        path.unlink()
        assert cache.read(path, force=True) == b"data" * 1000
        with cache.open(path, force=True) as file:
            assert file.read() == b"data" * 1000
    listed = json.loads(command("ls", "--json", "--root", root).stdout)
    assert [entry["name"] for entry in listed] == [path.as_uri()]


def test_s39_a_forced_local_file_that_changes_is_seen(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"one")
    with forebay.Cache(root, max_age=0) as cache:
        assert cache.read(path, force=True) == b"one"
        path.write_bytes(b"twenty")
        assert cache.read(path, force=True) == b"twenty"


def test_s39_what_is_pinned_stays_is_counted_and_is_listed(
    root: Path, server: ScriptedServer, tmp_path: Path, command: Callable[..., Any], children: Callable[..., Any]
) -> None:
    body = os.urandom(2 * MiB)
    url, later = server.put("/x.bin", body), server.put("/later.bin", body)

    def flood() -> None:
        with forebay.Cache(root) as cache:
            for i in range(20):
                cache.put(str(i), os.urandom(MiB))

    with forebay.Cache(root, budget=8 << 20, max_age=0) as cache:
        cache.read(url, pin=True)
        cache.read(later)
        cache.pin(later)
        children(flood).result()
        assert {entry.name for entry in cache.entries() if entry.life == "pinned"} == {url, later}
        assert cache.stats().bytes_used <= 8 * MiB
        assert url not in cache.clear().execute().removed
        assert (cache.evict(url).removed, cache.entry(url) is None) == ((), False)
        server.put("/x.bin", body[::-1])
        assert cache.read(url) == body[::-1]  # a pin follows the name
        children(flood).result()
        assert cache.entry(url) is not None
    listed = {entry["name"]: entry["life"] for entry in json.loads(command("ls", "--json", "--root", root).stdout)}
    assert listed[url] == listed[later] == "pinned"
    assert "pinned" in command("ls", "--root", root).stdout
    assert command("unpin", "--root", root, later).returncode == 0
    with forebay.Cache(root) as cache:
        children(flood).result()
        assert cache.entry(later) is None
        assert cache.entry(url) is not None
        cache.unpin(url)
        assert cache.evict(url).removed == (url,)
        with pytest.raises(KeyError):
            cache.pin(url)


def test_s39_all_pinned_and_no_room_is_no_error(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(3 * MiB)
    urls = [server.put(f"/{i}.bin", body) for i in range(4)]
    with forebay.Cache(root, budget=7 << 20) as cache:
        for url in urls:
            assert cache.read(url, pin=True) == body
        assert len(cache.entries()) == 2


def test_s39_switched_off_it_is_the_same_calls(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", b"data")
    with forebay.Cache(root, enabled=False) as cache:
        assert cache.read(url) == b"data"
        with cache.open(url) as file:
            assert file.read() == b"data"
        assert cache.put("key", b"value") is False
        assert cache.get("key") is None
        assert cache.get_or_put("key", lambda: b"value") == b"value"
        assert cache.entries() == []
    assert not root.exists()
