"""Scenario 9: a place whose locks are not to be trusted is refused; and if locks lie, bytes are right all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._kernel import host, locks
from forebay.fetch import files
from forebay.testing import ScriptedServer


@pytest.mark.parametrize("kind", ["nfs", "lustre", "gpfs", "cifs", "smb2", "fuse", "9p", "virtiofs", "beegfs", "ceph", "afs"])
def test_s09_an_explicit_place_is_refused_in_one_clear_error(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "fs_kind", lambda path: kind)
    with pytest.raises(forebay.errors.RootRefused) as caught:
        forebay.Cache(root)
    assert str(root) in str(caught.value)
    assert kind in str(caught.value)
    assert "choose a directory on a local disk" in str(caught.value)
    assert not root.exists()


def test_s09_the_default_place_moves_with_one_warning(tmp_path: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home, local = tmp_path / "home", tmp_path / "local"
    home.mkdir()
    local.mkdir()
    kind = host.fs_kind
    monkeypatch.setattr(host, "fs_kind", lambda path: "nfs" if str(path).startswith(str(home)) else kind(path))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SLURM_TMPDIR", str(local))
    with warnings() as said:
        for _ in range(2):
            with forebay.Cache() as cache:
                assert cache.path == local / f"forebay-{os.getuid()}"
                cache.put("key", b"value")
    assert len(said) == 1
    assert "FOREBAY_HOME" in said[0]
    assert list(home.iterdir()) == []


def test_s09_as_an_upstream_it_serves_without_locks(
    root: Path, tmp_path: Path, server: ScriptedServer, children: Callable[..., Any]
) -> None:
    url = server.put("/x.bin", b"data" * 100_000)
    upstream = tmp_path / "upstream"

    def fill() -> None:
        with forebay.Cache(upstream) as cache:
            cache.read(url)

    def read() -> bytes:
        kind = host.fs_kind
        host.fs_kind = lambda path: "nfs" if str(path).startswith(str(upstream)) else kind(path)
        with forebay.Cache(root, upstream=upstream, max_age="forever") as cache:
            return bytes(cache.read(url))

    children(fill).result()
    assert children(read).result() == b"data" * 100_000
    assert server.gets == 1


def test_s09_locks_that_exclude_nobody_mix_no_bytes(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    """16 getters; every lock succeeds for everybody. More than one download may happen, but none is mixed."""
    bodies = [os.urandom(1_500_000 + i) for i in range(4)]
    urls = [server.put(f"/{i}.bin", body, latency=0.02) for i, body in enumerate(bodies)]
    start = barrier(16)

    def getter(number: int) -> None:
        locks._set = lambda fd, kind, offset: True  # type: ignore[assignment]
        with forebay.Cache(root, budget="64MiB") as cache:
            start.wait(60)
            for turn in range(8):
                i = (turn + number) % 4
                assert cache.read(urls[i], max_age=0) == bodies[i]
                with cache.open(urls[i]) as file:
                    assert file.read() == bodies[i]

    for child in [children(lambda n=n: getter(n)) for n in range(16)]:
        child.result()
    with forebay.Cache(root) as cache:
        cache.repair()


def test_s09_a_leased_file_that_is_removed_before_it_is_opened(root: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process evicts it: where locks exclude nobody, the lease does not hinder that."""
    url = server.put("/x.bin", b"data" * 100_000)
    opened = files.opened
    with forebay.Cache(root) as cache:
        cache.read(url)
        with monkeypatch.context() as patch:
            patch.setattr(files, "opened", lambda lease: [os.unlink(lease), opened(lease)][1])
            with cache.open(url) as file:
                assert file.read() == b"data" * 100_000
        assert cache.stats().fallbacks == 1
        with cache.open(url) as file:
            assert file.read() == b"data" * 100_000
        assert cache.evict(url).removed
