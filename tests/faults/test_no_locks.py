"""A kernel without open-file-description locks, such as that of an old gVisor: the cache has no store, and says why."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import forebay
from forebay import errors
from forebay._kernel import locks
from forebay.cli.arguments import opened
from forebay.cli.checkup import doctor
from forebay.testing import ScriptedServer

UNKNOWN = 1 << 20  # a number to which each kernel answers as an old one does to that of such a lock


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", UNKNOWN)
    monkeypatch.setattr(fcntl, "F_OFD_GETLK", UNKNOWN)


@pytest.fixture
def url() -> Iterator[str]:
    with ScriptedServer() as server:
        yield server.put("/object", b"q" * 600_000)


def test_read_serves_the_source_after_one_warning_that_names_the_locks(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING), forebay.Cache(tmp_path / "root", budget="100MB") as cache:
        assert len(cache.read(url)) == len(cache.read(url)) == 600_000
    assert len(caplog.records) == 1
    assert "OFD" in caplog.text


def test_what_needs_a_store_raises_an_error_that_names_the_locks(tmp_path: Path, url: str) -> None:
    with forebay.Cache(tmp_path / "root", budget="100MB") as cache:
        assert not cache.put("key", b"value")
        assert bytes(cache.get_or_put("key", lambda: b"value")) == b"value"
        with pytest.raises(errors.NoLocks, match="OFD"):
            cache.local(url)


def test_so_does_a_directory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with forebay.Cache(tmp_path / "root", budget="100MB") as cache, pytest.raises(errors.NoLocks, match="OFD"):
        cache.directory(tmp_path / "data", force=True)


def test_a_verb_gives_the_reason_as_an_error_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (root / "FORMAT").write_bytes(b"")
    with pytest.raises(errors.NoLocks, match="OFD"), opened(root, change=True):
        pass


def test_a_claim_raises_an_error_that_names_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    with pytest.raises(errors.NoLocks, match="OFD"):
        forebay.claim(tmp_path / "directory", "s3://bucket/prefix")


def test_looking_at_a_lock_raises_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.NoLocks):
        locks.LockFile(tmp_path / "file").is_locked(0)
    with pytest.raises(errors.NoLocks):
        locks.Claims(tmp_path / "file").try_claim(0)


def test_doctor_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor, ["--root", str(tmp_path / "root")])
    assert result.exit_code != 0
    assert "OFD" in result.output


@pytest.mark.parametrize("refused", [OSError(38, "Function not implemented"), PermissionError(1, "Operation not permitted")])
def test_a_claim_says_what_else_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: OSError) -> None:
    def refuse(*_: object) -> None:
        raise refused

    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    monkeypatch.setattr("forebay._kernel.host.allocate", refuse)
    monkeypatch.setattr(locks, "take", lambda *_: True)
    with pytest.raises(errors.RootRefused, match=refused.strerror):
        forebay.claim(tmp_path / "directory", "s3://bucket/prefix")


def test_a_cache_that_cannot_be_opened_for_another_reason_is_not_full(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.undo()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("forebay._engine.store.open_directory", refuse)
    with forebay.Cache(tmp_path / "root", budget="100MB") as cache, pytest.raises(errors.CacheFault, match="not implemented") as raised:
        cache.local(url)
    assert not isinstance(raised.value, errors.NoSpace)
