"""The file objects that the cache returns, when they are dropped."""

from __future__ import annotations

import pytest

import forebay
from forebay import Lease
from forebay.fetch.block_files import BlockFile, ReadAhead
from forebay.testing import ScriptedServer
from tests.strikes import soon, strike_once


def test_a_signal_while_an_open_file_is_dropped_is_not_lost(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache.open(server.put("/a", b"a" * 100_000))
    lease = file.raw._lease  # type: ignore[attr-defined]
    strike_once(monkeypatch, Lease, "close")
    with soon():
        del file
    assert lease.closed


def test_a_signal_while_a_file_of_blocks_is_dropped_is_not_lost(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cache.open(server.put("/a", b"a" * 100_000), block_size=65536)
    assert isinstance(file, BlockFile)
    strike_once(monkeypatch, ReadAhead, "close")
    with soon():
        del file
