"""The processes that use a root, as the catalog knows them."""

from __future__ import annotations

import logging
import os

import pytest

import forebay
from forebay._engine.catalog import people
from forebay._engine.store import Store


def test_a_process_knows_its_own_row(cache: forebay.Cache, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken for one that another program wrote."""
    with caplog.at_level(logging.WARNING, "forebay"):
        assert isinstance(cache._store, Store)
        assert cache._store._owners.me()
        found = people.every(cache._store._catalog)
    assert [owner.pid for owner in found] == [os.getpid()]
    assert caplog.records == []
