"""Scenario 32: what others put into the root is never executed, and a root is its owner's."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer


class Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def test_s32_planted_pickles_stay_bytes(root: Path, tmp_path: Path, server: ScriptedServer, command: Callable[..., Any]) -> None:
    marker = tmp_path / "executed"
    evil = [pickle.dumps(Evil(str(marker)), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    pickle_url = server.put("/evil.pkl", evil[-1])
    with forebay.Cache(root) as cache:
        cache.read(pickle_url)
        for i, data in enumerate(evil):
            cache.put(str(i), data)
            cache.put(f"large {i}", data + bytes(50_000))
    # Planted where files lie, and in every text of the catalog.
    for place in (
        "blobs/00/0000000000000000",
        "blobs/00/0000000000000000.pkl",
        "tmp/evil.pkl",
        "trees/evil.pkl",
        "evil.pkl",
        "shared/evil.pkl",
    ):
        (root / place).write_bytes(evil[-1])
    with sqlite3.connect(root / "catalog.sqlite") as catalog:
        for column in ("meta", "validator"):
            catalog.execute(f"UPDATE entries SET {column} = ? WHERE key = 'large 1'", (evil[0].decode("latin1"),))
    catalog.close()
    with forebay.Cache(root) as cache:
        for i, data in enumerate(evil):
            assert cache.get(str(i)) == data
            assert cache.get(f"large {i}") == data + bytes(50_000)
        with cache.open(pickle_url) as file:
            assert file.read() == evil[-1]
        cache.entries()
        cache.stats()
        assert cache.check(deep=True)  # the strays are seen
        assert cache.get_or_put("fresh", lambda: b"value") == b"value"
    for verb in ("ls", "du", "stats", "verify", "doctor", "prune"):
        command(verb, "--root", root, *(["--json"] if verb != "doctor" else []), *(["--yes"] if verb == "prune" else []))
    repaired = command("verify", "--repair", "--root", root, "--json")
    assert json.loads(repaired.stdout)["mended"]
    assert not marker.exists()
    for stray in ("evil.pkl", "shared/evil.pkl", "tmp/evil.pkl", "trees/evil.pkl"):
        (root / stray).unlink(missing_ok=True)


def test_s32_errors_that_are_shared_run_no_code(root: Path, tmp_path: Path, children: Callable[..., Any]) -> None:
    """A failure in the catalog becomes an error of Forebay or a built-in one, made of plain values."""
    from forebay import errors

    marker = tmp_path / "executed"
    for kind in ("eval", "exec", "os.mkdir", "__import__", "SystemExit", "KeyboardInterrupt", "type", "errors"):
        found = errors.from_wire({"kind": kind, "message": "m", "args": [str(marker)], "facts": {"a": 1}})
        assert isinstance(found, errors.FillFailed)
    assert not marker.exists()


def test_s32_a_root_is_its_owners(root: Path) -> None:
    before = os.umask(0)
    try:
        with forebay.Cache(root) as cache:
            cache.put("key", bytes(100_000))
    finally:
        os.umask(before)
    assert root.stat().st_mode & 0o777 == 0o700
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o022 == 0, path


def test_s32_a_world_writable_root_is_refused(root: Path) -> None:
    with forebay.Cache(root):
        pass
    root.chmod(0o777)
    with pytest.raises(forebay.errors.RootRefused, match="chmod o-w"):
        forebay.Cache(root)
    root.chmod(0o700)
