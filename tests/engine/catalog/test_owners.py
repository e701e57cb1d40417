"""The processes that use a root, as the catalog knows them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.catalog import processes, writer
from forebay._engine.store import Store
from forebay._kernel import locks
from tests.harness import MiB, opened


def test_a_process_knows_its_own_row(cache: forebay.Cache, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken for one that another program wrote."""
    with caplog.at_level(logging.WARNING, "forebay"):
        assert isinstance(cache._store, Store)
        assert cache._store.engine.owners.me()
        found = processes.every(cache._store.engine.catalog)
    assert [owner.pid for owner in found] == [os.getpid()]
    assert caplog.records == []


def test_a_script_whose_name_is_not_utf_8_registers(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/\udce9t\udce9.py"])
    assert cache.put("a", bytes(2_000_000))
    assert isinstance(cache._store, Store)
    assert [owner.command for owner in processes.every(cache._store.engine.catalog)] == ["\\udce9t\\udce9.py"]


def test_text_that_is_none_is_a_fault_of_the_cache(cache: forebay.Cache) -> None:
    assert isinstance(cache._store, Store)
    with pytest.raises(errors.CacheFault, match="cannot hold"), cache._store.engine.catalog.write() as txn:
        txn.run("INSERT INTO meta VALUES (?, 1)", "\udce9")


def test_who_could_not_register_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LONGEST_WAIT", 0.05)
    with opened(tmp_path / "root", MiB) as store:
        other, owners = writer.WriterLock(store.root, store.engine.words), locks.LockFile(store.root.lock("owners"))
        other.take(0)
        for _ in range(2):
            with pytest.raises(errors.WriterBusy):
                store.engine.owners.me()
        assert owners.first_locked(1, (1 << 62) - 1) is None
        other.release()
        assert owners.is_locked(store.engine.owners.me())
        owners.close()
        other.close()
