"""`Cache(max_rate=..., max_connections=...)`: set for every process, kept, shown, lifted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.cli.main import run
from forebay.testing import ScriptedServer
from tests.processes import in_child
from tests.remote_directories import http_directory

BUDGET = 64 << 20


def limits_in(root: Path) -> tuple[int, int]:
    with forebay.Cache(root) as cache:
        stats = cache.stats()
        return stats.max_rate, stats.max_connections


def test_they_are_set_for_every_process_until_they_are_lifted(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=BUDGET, max_rate="1.5GB/s", max_connections=64) as cache:
        assert in_child(lambda: limits_in(tmp_path / "root")) == (1_500_000_000, 64)
        in_child(lambda: forebay.Cache(tmp_path / "root", max_connections=0).close())
        assert (cache.stats().max_rate, cache.stats().max_connections) == (1_500_000_000, 0)
    assert limits_in(tmp_path / "root") == (1_500_000_000, 0)
    forebay.Cache(tmp_path / "root", max_rate=0).close()
    assert limits_in(tmp_path / "root") == (0, 0)


def test_the_environment_sets_them_and_a_pickle_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.Cache(tmp_path / "root", budget=BUDGET, max_rate=1000, max_connections=3) as cache:
        text = pickle.dumps(cache)
    monkeypatch.setenv("FOREBAY_MAX_RATE", "2 MB/s")
    monkeypatch.setenv("FOREBAY_MAX_CONNECTIONS", "5")
    with pickle.loads(text) as cache:
        stats = cache.stats()
        assert (stats.max_rate, stats.max_connections) == (1000, 3)
    assert limits_in(tmp_path / "root") == (2_000_000, 5)
    with forebay.Cache(tmp_path / "root", max_rate=7, max_connections=0) as cache:
        stats = cache.stats()
        assert (stats.max_rate, stats.max_connections) == (7, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"max_rate": -1}, {"max_rate": "500"}, {"max_rate": "fast"}, {"max_rate": 1 << 60}, {"max_rate": True}]
    + [{"max_connections": value} for value in (-1, 1 << 16, "4", True)],
)  # fmt: skip
def test_what_is_not_valid_is_refused_by_name(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(errors.ConfigError, match=next(iter(wrong))):
        forebay.Cache(tmp_path / "root", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("FOREBAY_MAX_RATE", "500"), ("FOREBAY_MAX_CONNECTIONS", "many")])
def test_a_variable_that_is_not_valid_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match=f"{name}='{value}'"):
        forebay.Cache(tmp_path / "root")


def test_they_survive_a_lost_catalog(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forebay.Cache(tmp_path / "root", budget=BUDGET, max_rate=1000, max_connections=3).close()
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (tmp_path / "root" / name).unlink(missing_ok=True)
    assert limits_in(tmp_path / "root") == (1000, 3)
    assert "max_rate 1,000" in caplog.text
    assert "max_connections 3" in caplog.text


def is_open(connection: socket.socket) -> bool:
    """Whether the client has not closed it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def most_at_once(cache: forebay.Cache, server: ScriptedServer, get: Callable[[forebay.Cache], object]) -> int:
    """How many connections the server has at most while they are used."""
    found: list[int] = []
    server.on_request = lambda _: found.append(sum(map(is_open, tuple(server._open))))
    get(cache)
    return max(found)


@pytest.mark.parametrize("lost", ["nothing", "slots"])
def test_a_process_that_opens_the_root_applies_what_the_catalog_has(tmp_path: Path, server: ScriptedServer, lost: str) -> None:
    """Also where the process that set them died before the head, which all have mapped, had them."""
    forebay.Cache(tmp_path / "root", budget=BUDGET, max_connections=1).close()
    if lost == "slots":
        shutil.rmtree(tmp_path / "root" / "shared")
    urls = [server.put(f"/{number}", bytes(1000), latency=0.02) for number in range(8)]
    with forebay.Cache(tmp_path / "root") as cache:
        assert most_at_once(cache, server, lambda cache: cache.read_many(urls)) == 1


def test_a_cache_that_is_switched_off_has_none(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False, max_rate=1000, max_connections=3) as cache:
        assert (cache.stats().max_rate, cache.stats().max_connections) == (0, 0)
    assert not os.path.exists(tmp_path / "root")


@pytest.mark.rotates
@pytest.mark.parametrize("budget", [BUDGET, 1 << 20], ids=["with room", "past the cache"])
def test_a_copy_of_a_directory_stays_within_them(budget: int, tmp_path: Path, server: ScriptedServer) -> None:
    bodies = {f"f{number}": bytes([number]) * 200_000 for number in range(12)}
    url = http_directory(server, bodies)
    for served in server.objects.values():
        served.latency = 0.02
    with forebay.Cache(tmp_path / "root", budget=budget, min_free=0, max_connections=2, max_rate="4MB/s") as cache:
        began = time.monotonic()
        assert most_at_once(cache, server, lambda cache: cache.copy_directory(url, tmp_path / "copy")) <= 2
        assert time.monotonic() - began > 0.3  # 2.4 MB
        assert {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()} == bodies


def test_the_command_line_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "root")
    forebay.Cache(root, budget=BUDGET).close()
    assert run(["du", "-C", root]) == 0
    assert "transfers" not in capsys.readouterr().out
    assert run(["stats", "-C", root]) == 0
    assert capsys.readouterr().out.count("no limit") == 2
    forebay.Cache(root, max_rate="1GB", max_connections=64).close()
    assert run(["du", "-C", root]) == 0
    assert "transfers are limited to 1 GB a second and 64 connections to a host" in capsys.readouterr().out
    assert run(["du", "-C", root, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["max_rate"], shown["max_connections"]) == (10**9, 64)
    assert run(["stats", "-C", root]) == 0
    assert "1 GB/s" in capsys.readouterr().out


def test_a_verb_that_only_looks_sets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "root")
    forebay.Cache(root, budget=BUDGET, max_connections=3).close()
    monkeypatch.setenv("FOREBAY_MAX_CONNECTIONS", "9")
    assert run(["ls", "-C", root]) == 0
    monkeypatch.delenv("FOREBAY_MAX_CONNECTIONS")
    assert limits_in(tmp_path / "root") == (0, 3)
