"""`pull` and `warm` with `--dry-run`: what would be fetched, with sizes, and nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer
from tests.harness import answers_of
from tests.remote_directories import FILES, http_directory

from .conftest import Run

VERBS = pytest.mark.parametrize("verb", ["pull", "warm"])


@VERBS
def test_what_would_be_fetched_is_shown_with_sizes(run: Run, cache: Cache, server: ScriptedServer, verb: str) -> None:
    there, new, none = server.put("/there", bytes(1000)), server.put("/new", bytes(2000)), f"{server.url}/none"
    cache.read(there)
    gets, _ = answers_of(server)
    ran = run(verb, "--dry-run", there, new, none)
    assert [line.split() for line in ran.lines[1:]] == [
        ["1", "kB", "in", "the", "cache", "already", there],
        ["2", "kB", "to", "fetch", new],
        ["?", "failed", none],
        ["1", "URL", "would", "be", "fetched,", "2", "kB"],
    ]
    assert (ran.code, none in ran.err, answers_of(server)[0]) == (1, True, gets)
    assert [(one["url"], one["state"], one["size"]) for one in run(verb, "-n", "--json", there, new).json] == [
        (there, "kept", 1000), (new, "fetch", 2000),
    ]  # fmt: skip
    assert [entry.name for entry in cache.entries()] == [there]


def test_a_directory_is_shown_with_the_size_of_the_part(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = http_directory(server, FILES)
    (one,) = run("pull", "-n", "--json", url, "--include", "*.json").json
    assert (one["state"], one["size"]) == ("fetch", sum(len(body) for name, body in FILES.items() if name.endswith(".json")))
    assert run("pull", url, "--include", "*.json").code == 0
    assert [one["state"] for one in run("pull", "-n", "--json", url, "--include", "*.json").json] == ["kept"]
    assert [one["state"] for one in run("pull", "-n", "--json", url).json] == ["fetch"]


def test_a_refresh_asks_what_has_changed(run: Run, cache: Cache, server: ScriptedServer) -> None:
    same, changed = server.put("/same", bytes(1000)), server.put("/changed", bytes(1000))
    url = http_directory(server, FILES)
    assert run("pull", same, changed, url).code == 0
    server.put("/changed", bytes(3000))
    assert [(one["state"], one["size"]) for one in run("pull", "-n", "--json", same, changed).json] == [("kept", 1000)] * 2
    planned = run("pull", "-n", "--refresh", "--json", same, changed, url).json
    assert [(one["state"], one["size"]) for one in planned[:2]] == [("kept", 1000), ("fetch", 3000)]
    assert planned[2]["state"] == "kept"
    assert run("pull", "-n", "--refresh", same).lines[-1] == "0 URLs would be fetched, 0 B"
    name = next(iter(FILES))
    http_directory(server, FILES | {name: b"another version"})
    assert [one["state"] for one in run("pull", "-n", "--json", url).json] == ["kept"]
    assert [one["state"] for one in run("pull", "-n", "--refresh", "--json", url).json] == ["fetch"]
    assert [cache.entry(each).size for each in (same, changed)] == [1000, 1000]


def test_a_listing_gives_the_sizes(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}.tar").write_bytes(bytes(1000))
    assert run("warm", "-n", tmp_path / "data").lines[-1] == "3 URLs would be fetched, 3 kB"
    assert not home.exists()


@VERBS
def test_no_cache_is_created_and_offline_no_remote_is_asked(
    run: Run, home: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    url = server.put("/new", bytes(2000))
    assert run(verb, "-n", url).code == 0
    assert not home.exists()
    requests = len(server.requests)
    monkeypatch.setenv("FOREBAY_OFFLINE", "1")
    assert (run(verb, "-n", url).code, len(server.requests)) == (3, requests)
    assert not home.exists()
