"""Ray's tasks and CHIA's names in a root that a group shares: what others can write is never unpickled."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import forebay
from forebay import errors
from forebay._engine.null_store import NullStore
from forebay.adapters import chia
from forebay.adapters.ray import sessions as ray_sessions
from forebay.adapters.ray import tasks as ray_tasks
from tests.cache.test_shared_roots import Evil, Result

NODE = "the node of this process"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group's root, and processes that are told of it by their environment, as those of a cluster are."""
    with forebay.Cache(tmp_path / "shared", shared=True, budget="64MiB", min_free=0):
        pass
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o2770
    monkeypatch.setenv("FOREBAY_SHARED", "1")
    monkeypatch.setattr(ray_sessions, "here", lambda: NODE)
    return tmp_path / "shared"


@pytest.fixture
def tasks(root: Path) -> Iterator[ray_tasks.RayTasks]:
    """As `start` gives them; its actor is not asked."""
    session = ray_sessions.session_of("a group's")
    session.attach(1, ray_tasks._location(1, root, "MB", None, "read-through"))
    session._good_until = math.inf
    yield ray_tasks.RayTasks("a group's")
    session.values().fetcher.store.close()  # type: ignore[union-attr]
    session.stop()


def plant(root: Path, name: str, mark: Path) -> None:
    """Another member of the group leaves a pickle where values of this name are."""
    with forebay.Cache(root) as cache:
        assert cache.tasks(name, codec="pickle").write("t", Evil(mark))


def look(write: Callable[[str, Any], bool], read: Callable[[str], tuple[bool, Any]], mark: Path) -> None:
    assert read("t") == (False, None)
    assert not mark.exists()
    with pytest.raises(errors.ConfigError, match="codec='pytree' stores arrays"):
        write("u", Result())
    assert write("u", {"a": [1, "b"]})
    assert read("u") == (True, {"a": [1, "b"]})


def test_tasks_of_a_cluster(root: Path, tasks: ray_tasks.RayTasks, tmp_path: Path) -> None:
    place = tasks._session.location()
    assert place is not None
    assert place.codec == "pytree"
    plant(root, ray_sessions.SPACE, tmp_path / "executed")
    look(tasks.write, tasks.read, tmp_path / "executed")


def test_chias_names(root: Path, tmp_path: Path) -> None:
    plant(root, chia.SPACE, tmp_path / "executed")
    actor = chia._Cache(str(root), 1 << 20)
    look(actor.write, actor.read, tmp_path / "executed")
    actor._tasks._values.fetcher.store.close()  # type: ignore[union-attr]


def unreachable(method: str, *args: Any, size: int = 0) -> Any:
    raise AssertionError("the head is not asked")


@pytest.mark.parametrize("codec", ["pickle", "pytree"])
def test_a_node_whose_own_cache_is_a_groups_copies_no_pickles(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, codec: str
) -> None:
    """The head's root is one of its user's alone, and pickles."""
    with monkeypatch.context() as patch:
        patch.delenv("FOREBAY_SHARED")
        own = ray_tasks._location(1, tmp_path / "own", "MB", None, "read-through")
    assert own.codec == "pickle"
    monkeypatch.setenv("FOREBAY_HOME", os.fspath(root))
    away: Any = ray_sessions.open_values(dataclasses.replace(own, node="another", codec=codec), unreachable)
    store = away.fetcher.store
    assert (f"others can write to {root}: no values are copied to it" in caplog.text) == (codec == "pickle")
    assert isinstance(store, NullStore) == (codec == "pickle")
    store.close()
