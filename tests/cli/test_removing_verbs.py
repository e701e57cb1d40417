"""`rm`, `prune`, `clear`, `pin`, `unpin`: what goes, what stays, who is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer
from tests.remote_directories import FILES, http_directory

from .conftest import Run


@pytest.fixture
def urls(cache: Cache, server: ScriptedServer) -> list[str]:
    """Three objects of 100 kB, the first one used longest ago."""
    found = [server.put(f"/{name}", name.encode() * 100_000) for name in "abc"]
    for url in found:
        cache.read(url)
    return found


def kept(cache: Cache) -> list[str]:
    return sorted(entry.name for entry in cache.entries())


# -- rm ----------------------------------------------------------------------------------------------------------------


def test_rm(run: Run, cache: Cache, urls: list[str]) -> None:
    ran = run("rm", urls[0], urls[2])
    assert ran.code == 0
    assert "2 entries removed" in ran.out
    assert kept(cache) == [urls[1]]


def test_s18_rm_spares_what_is_in_use_and_says_so(run: Run, cache: Cache, urls: list[str]) -> None:
    with cache.local(urls[0]) as path:
        ran = run("rm", urls[0], urls[1])
        assert ran.code == 1
        assert f"in use, kept: {urls[0]}" in ran.lines
        with open(path, "rb") as file:
            assert file.read() == b"a" * 100_000
    assert kept(cache) == [urls[0], urls[2]]


def test_rm_of_what_is_not_there(run: Run, cache: Cache, urls: list[str]) -> None:
    ran = run("rm", "http://nowhere.invalid/x", urls[0])
    assert ran.code == 3
    assert "nowhere.invalid" in ran.err
    assert kept(cache) == urls[1:]


@pytest.mark.parametrize("is_whole", [False, True])
def test_rm_of_an_object_of_which_blocks_are_cached(
    run: Run, cache: Cache, urls: list[str], server: ScriptedServer, is_whole: bool
) -> None:
    url = server.put("/large", bytes(300_000))
    with cache.open(url, block_size=64_000) as file:
        file.read(100_000)
    if is_whole:
        cache.read(url)
    count = 3 + is_whole
    ran = run("rm", "--dry-run", url)
    assert ran.code == 0
    assert f"{count} entries" in ran.out
    assert len(kept(cache)) == 3 + count
    ran = run("rm", url)
    assert ran.code == 0
    assert f"{count} entries removed" in ran.out
    assert kept(cache) == urls


def test_rm_of_one_name_twice(run: Run, cache: Cache, urls: list[str]) -> None:
    ran = run("rm", urls[0], urls[0])
    assert ran.code == 0
    assert "1 entry removed" in ran.out


def test_rm_leaves_what_is_pinned(run: Run, cache: Cache, urls: list[str]) -> None:
    cache.pin(urls[0])
    ran = run("rm", *urls[:2])
    assert ran.code == 1
    assert f"pinned, kept: {urls[0]}" in ran.lines
    assert kept(cache) == [urls[0], urls[2]]


def test_rm_as_json(run: Run, cache: Cache, urls: list[str]) -> None:
    found = run("rm", "--json", urls[0]).json
    assert found["removed"] == [urls[0]]
    assert found["spared"] == []
    assert found["freed"] >= 100_000


def test_rm_by_filter_asks(run: Run, cache: Cache, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("rm", "-f", "size>1kB", "--dry-run").code == 0
    ran = run("rm", "-f", "size>1kB")
    assert ran.code == 1
    assert "--yes" in ran.err
    assert kept(cache) == urls
    monkeypatch.setattr(sys, "stdin", Person("n\n"))
    assert run("rm", "-f", "size>1kB").code == 1
    assert kept(cache) == urls
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    assert run("rm", "-f", "size>1kB").code == 0
    assert kept(cache) == []


class Person:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.answer


@pytest.mark.parametrize("arguments", [(), ("a", "-f", "size>1")])
def test_rm_wants_names_or_a_filter(run: Run, cache: Cache, arguments: tuple[str, ...]) -> None:
    assert run("rm", *arguments).code == 2


def test_rm_dry_run_of_names(run: Run, cache: Cache, urls: list[str]) -> None:
    found = run("rm", "--json", "--dry-run", urls[1]).json
    assert [victim["name"] for victim in found["victims"]] == [urls[1]]
    assert kept(cache) == urls


def test_rm_dry_run_tells_what_is_pinned(run: Run, cache: Cache, urls: list[str]) -> None:
    cache.pin(urls[0])
    ran = run("rm", "--dry-run", *urls[:2])
    assert (ran.code, ran.lines[-2:]) == (0, ["1 entry would be removed, 102 kB", f"pinned, kept: {urls[0]}"])
    assert run("rm", "--json", "--dry-run", *urls[:2]).json["pinned"] == [urls[0]]
    assert kept(cache) == urls


# -- prune, clear ------------------------------------------------------------------------------------------------------


def test_prune_of_a_tidy_cache_removes_nothing(run: Run, cache: Cache, urls: list[str]) -> None:
    ran = run("prune")
    assert (ran.code, ran.out) == (0, "0 entries removed, 0 B freed\n")
    assert kept(cache) == urls
    assert run("prune", "--dry-run").out == "0 entries would be removed, 0 B\n"


def test_s19_prune_of_what_is_over_the_budget_shows_before_it_removes(run: Run, home: Path, cache: Cache, urls: list[str]) -> None:
    with cache.local(urls[0]), cache.local(urls[1]), cache.local(urls[2]), Cache(home, budget=150_000):
        pass
    shown = run("prune", "--dry-run", "--json").json
    assert [victim["name"] for victim in shown["victims"]] == urls[:2]
    assert kept(cache) == urls
    assert run("prune", "--json", "--yes").json["removed"] == urls[:2]
    assert kept(cache) == urls[2:]


def test_prune_frees_what_was_used_longest_ago(run: Run, cache: Cache, urls: list[str]) -> None:
    used = run("du", "--json").json["used"]
    want = 50_000_000 - used + 150_000
    shown = run("prune", "--free", want, "--dry-run", "--json").json
    assert [victim["name"] for victim in shown["victims"]] == urls[:2]
    assert kept(cache) == urls
    assert run("prune", "--free", want).code == 1  # nobody there to ask
    assert kept(cache) == urls
    ran = run("prune", "--free", want, "--yes", "--json")
    assert ran.code == 0
    assert ran.json["removed"] == urls[:2]
    assert kept(cache) == urls[2:]


def test_prune_by_filter_and_space(run: Run, cache: Cache, urls: list[str]) -> None:
    cache.put("k", b"v")
    assert run("prune", "--filter", "size<1kB", "--yes").code == 0
    assert kept(cache) == urls
    assert run("prune", "--space", "values").code == 2


@pytest.mark.parametrize("verb", [("ls",), ("clear", "--yes"), ("prune", "--yes", "--filter", "size>0")])
def test_a_space_that_is_not_there(run: Run, cache: Cache, urls: list[str], verb: tuple[str, ...]) -> None:
    ran = run(*verb, "--space", "feathers")
    assert ran.code == 3
    assert "'feathers'; the spaces are: urls" in ran.err
    assert "forebay du" in ran.err
    assert sorted(cache.stats().spaces) == ["urls"]  # looking for it made none


def test_clear_leaves_what_is_pinned_or_in_use(run: Run, cache: Cache, urls: list[str]) -> None:
    cache.pin(urls[0])
    with cache.local(urls[1]):
        assert run("clear").code == 1
        ran = run("clear", "--yes")
        assert ran.code == 0
        assert f"in use, kept: {urls[1]}" in ran.lines
    assert kept(cache) == urls[:2]


def test_clear_one_space(run: Run, cache: Cache, urls: list[str]) -> None:
    cache.put("k", b"v")
    assert run("clear", "--space", "values", "--yes").code == 0
    assert kept(cache) == urls


# -- pin ---------------------------------------------------------------------------------------------------------------


def test_pin_and_unpin(run: Run, cache: Cache, urls: list[str]) -> None:
    assert run("pin", urls[0], urls[1]).lines == [f"pinned: {urls[0]}", f"pinned: {urls[1]}"]
    assert run("ls", "-q", "-f", "life=pinned").lines == urls[:2]
    assert run("unpin", "--json", urls[0]).json == {"unpinned": [urls[0]], "missing": []}
    assert run("ls", "-q", "-f", "life=pinned").lines == urls[1:2]


def test_pin_of_what_is_not_there(run: Run, cache: Cache, urls: list[str]) -> None:
    ran = run("pin", "http://nowhere.invalid/x", urls[0])
    assert ran.code == 3
    assert ran.lines == [f"pinned: {urls[0]}"]


def test_directories_and_their_files_go_at_once(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = http_directory(server, FILES, "/run/step_1")
    for remove in (("clear", "--yes"), ("prune", "--yes", "--filter", "size>=0"), ("rm", "--yes", "--filter", "used<1d")):
        assert run("pull", url).code == 0
        with cache.directory(url):
            ran = run(*remove)
            assert f"in use, kept: directories:{url}" in ran.out
        ran = run(*remove)
        assert (ran.code, ", kept: " in ran.out) == (0, False), ran
        assert cache.entries() == []
