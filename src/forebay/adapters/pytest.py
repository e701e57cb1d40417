"""A plugin of pytest: fixtures for tests of programs that use Forebay. pytest loads it wherever Forebay is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Forebay is imported by the fixtures: most runs of pytest use none of them.

if TYPE_CHECKING:
    from forebay.cache import Cache
    from forebay.testing import ScriptedServer


@pytest.fixture
def forebay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """An empty `Cache` of this test alone, with a budget of 64 MiB; no setting of the caller's applies.

    ``Cache()`` without a root opens the same one, in the test and in processes that it starts. Claims are separate, too."""
    import os

    from forebay.cache import Cache

    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "forebay"
    monkeypatch.setenv("FOREBAY_HOME", str(home))
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "forebay-claims"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "forebay-config"))
    with Cache(home, budget=64 << 20, min_free=0) as cache:
        yield cache


@pytest.fixture
def forebay_server() -> Iterator[ScriptedServer]:
    """An HTTP server on loopback that serves what the test puts there, and counts requests (``gets``) and bytes (``sent``)."""
    from forebay.testing import ScriptedServer

    with ScriptedServer() as server:
        yield server
