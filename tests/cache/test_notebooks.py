"""Notebooks, in a real kernel: a slow fetch shows a bar, and caches and statistics are tables."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.cache.notebook import _Bar
from forebay.testing import ScriptedServer
from tests.processes import in_child

pytestmark = pytest.mark.processes

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def outputs(tmp_path: Path, *cells: str) -> list[list[Any]]:
    """What each cell shows."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def shown(tmp_path: Path, *cells: str) -> list[dict[str, Any]]:
    """What each cell shows, by kind of content."""
    return [{kind: text for one in some for kind, text in one["data"].items()} for some in outputs(tmp_path, *cells)]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first lines of a notebook: a cache."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(forebay.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FOREBAY_MIN_FREE", "0")
    return "import forebay\ncache = forebay.Cache('cache', budget='64MiB')\n"


def test_a_fetch_of_more_than_a_second_shows_a_bar(begin: str, tmp_path: Path, server: ScriptedServer) -> None:
    server.rate = 2e6
    slow, quick = server.put("/slow", bytes(4_000_000)), server.put("/quick", bytes(1000))
    first, second, cache, stats = shown(
        tmp_path, f"{begin}len(cache.read({slow!r}))", f"len(cache.read({quick!r}))", "cache", "cache.stats()"
    )
    assert first["text/plain"] == "4000000"
    assert 'max="4000000"' in first["text/html"]
    assert "4 MB of 4 MB" in first["text/html"]
    assert "text/html" not in second
    assert f"{tmp_path}/cache" in cache["text/html"]
    assert "of 67.1 MB" in cache["text/html"]
    assert "<th>misses</th><td>2</td>" in stats["text/html"]
    assert "<th>bytes remote</th><td>4 MB</td>" in stats["text/html"]


def test_fetches_at_the_same_time_show_one_bar(begin: str, tmp_path: Path, server: ScriptedServer) -> None:
    server.rate = 2e6  # so slow that all have begun before the first has ended
    urls = [server.put(f"/{number}", bytes(4_000_000 + 1_000_000 * number)) for number in range(6)]
    (some,) = outputs(tmp_path, f"import asyncio\n{begin}await asyncio.gather(*map(cache.aread, {urls!r}))\nNone")
    assert len(some) == 1


def test_a_child_does_not_wait_for_the_bar_that_a_thread_of_its_parent_draws() -> None:
    def report() -> int:
        signal.alarm(20)
        _Bar().fetching(1, 1)
        return 1

    with _Bar._lock:
        assert in_child(report) == 1


def test_it_can_be_switched_off(begin: str, tmp_path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_PROGRESS", "0")
    server.rate = 2e6
    (only,) = shown(tmp_path, f"{begin}len(cache.read({server.put('/slow', bytes(4_000_000))!r}))")
    assert only == {"text/plain": "4000000"}
