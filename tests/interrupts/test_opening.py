"""What a failed or an interrupted opening has opened is closed again."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.store import Store
from forebay._kernel import interrupts
from forebay.fetch import upstream
from tests.interrupts.every_line import held_locks
from tests.interrupts.signals import NUMBER, handler_that_raises, interrupted_after


def _used(path: Path) -> None:
    with forebay.Cache(path, min_free=0) as cache:
        assert cache.put("k", b"x" * 30_000)


def test_an_interrupt_while_the_upstream_is_opened_leaves_neither_root_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, above = tmp_path / "root", tmp_path / "above"
    _used(root)
    _used(above)
    held, real = held_locks(), upstream.Upstream._open

    def opens(self: Any) -> Any:
        signal.raise_signal(NUMBER)
        interrupts.point()
        return real(self)

    with handler_that_raises(KeyboardInterrupt), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(upstream.Upstream, "_open", opens)
        forebay.Cache(root, upstream=above)
    assert held_locks() == held
    assert not Store._opened


def test_an_upstream_that_fails_leaves_no_root_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_locks()

    def fails(self: Any, options: Any) -> None:
        raise RuntimeError("not foreseen")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not foreseen"):
        patch.setattr(upstream.Upstream, "__init__", fails)
        forebay.Cache(tmp_path / "root", upstream=tmp_path)
    assert held_locks() == held


def test_a_warning_that_fails_leaves_no_root_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_locks()

    def fails(*_: object) -> None:
        raise RuntimeError("not foreseen")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not foreseen"):
        patch.setattr("forebay._config.warn_once", fails)
        forebay.Cache(tmp_path / "root", budget=1 << 49)
    assert held_locks() == held


@pytest.mark.parametrize("name", ["root", "upstream"])
@pytest.mark.parametrize("path", ["\0", "a\0b", "\ud800"])
def test_what_can_be_no_path_is_a_wrong_argument(tmp_path: Path, name: str, path: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"{name}=.* cannot be the path of a directory"):
        forebay.Cache(**{"root": tmp_path / "root", name: path})
    assert not (tmp_path / "root").exists()


def test_an_interrupt_while_a_dropped_root_is_closed_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _used(tmp_path / "root")
    held = held_locks()
    forebay.Cache(tmp_path / "other")
    gc.collect()
    real = Store.close

    def closes(self: Store) -> None:
        signal.raise_signal(NUMBER)
        interrupts.point()
        real(self)

    with handler_that_raises(KeyboardInterrupt), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "close", closes)
        forebay.Cache(tmp_path / "root")
    gc.collect()
    _used(tmp_path / "root")
    assert held_locks() == held


@pytest.mark.parametrize("call", ["get", "samples"])
def test_a_hit_that_opens_the_root_again_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Where the root could not be used at first: a handler that raises an OSError there would be taken for its fault."""
    with monkeypatch.context() as patch:
        patch.setattr("forebay.fetch.opening.CacheOptions.open", _cannot)
        cache = forebay.Cache(tmp_path / "root", min_free=0)
    with cache:
        fetcher: Any = cache._fetcher
        samples: Any = cache.samples("s", 10)
        for turn in (fetcher.reopening, samples._pack._turn):
            turn._at = 0.0
        with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            interrupted_after(patch, Store, "open")
            cache.get("k") if call == "get" else samples.get(1)
        assert cache.put("k", b"x")


def _cannot(self: Any) -> Store:
    raise errors.CacheFault("it cannot be used for now")
