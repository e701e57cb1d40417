"""The processes that write to a root, as others know them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.catalog import writer_lock
from forebay._engine.store import Store
from forebay._kernel import locks
from forebay._model import ObjectInfo
from tests.harness import MiB, opened
from tests.processes import in_child


def test_a_write_names_its_process_while_it_lives(cache: forebay.Cache) -> None:
    store = cache._store
    assert isinstance(store, Store)
    with store.writing("urls", "k", resume=False) as writing:
        writing.begin(ObjectInfo("", 3 * MiB))
        (fetch,) = store.seeing.activity().fetches
        assert (fetch.key, fetch.total) == ("k", 3 * MiB)
        assert fetch.process.startswith(f"process {os.getpid()} on {socket.gethostname()} (")
        assert in_child(lambda: store.engine.parts.owners.me()) != store.engine.parts.owners.me()
        writing.write(0, bytes(3 * MiB))
        writing.publish()
    assert store.seeing.activity().fetches == ()


def test_text_that_is_none_is_a_fault_of_the_cache(cache: forebay.Cache) -> None:
    assert isinstance(cache._store, Store)
    with pytest.raises(errors.CacheFault, match="cannot hold"), cache._store.engine.parts.catalog.write() as txn:
        txn.run("INSERT INTO meta VALUES (?, 1)", "\udce9")


def test_an_id_needs_no_catalog_and_ends_with_its_process(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        other, owners = writer_lock.WriterLock(store.root, store.engine.parts.words), locks.LockFile(store.root.lock("owners"))
        other.take(0)  # another process writes
        me = store.engine.parts.owners.me()
        assert owners.is_locked(me)
        child = in_child(lambda: store.engine.parts.owners.me())
        assert child != me
        assert not owners.is_locked(child)
        other.release()
        owners.close()
        other.close()
