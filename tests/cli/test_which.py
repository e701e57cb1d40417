"""`which`, and `ls` as a tree or up to a limit."""

from __future__ import annotations

import os

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer

from .conftest import Run


def test_which_shows_what_is_known_of_an_object(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/a.tar", bytes(5000), etag='"v1"')
    cache.read(url, pin=True)
    (one,) = run("which", "--json", url).json
    assert (one["name"], one["size"], one["validator"], one["life"], one["leased_by"]) == (url, 5000, '"v1"', "pinned", [])
    with cache.local(url) as path:
        assert one["path"] == path
        (one,) = run("which", "--json", url).json
        assert [f"process {os.getpid()} " in who for who in one["leased_by"]] == [True]
        text = run("which", url).out
    assert f"process {os.getpid()} " in text
    for fact in (path, "5 kB", '"v1"', "pinned                   yes"):
        assert fact in text
    assert server.gets == 1


def test_which_says_what_is_not_there_and_shows_the_rest(run: Run, cache: Cache, server: ScriptedServer) -> None:
    cache.put("small", b"value")
    ran = run("which", "small", f"{server.url}/none")
    assert (ran.code, "values:small" in ran.out, "none: a program reads it" in ran.out) == (3, True, True)
    assert f"`forebay pull {server.url}/none` fetches it" in ran.err
    assert server.requests == []


def test_a_tree_has_sums_the_largest_first(run: Run, cache: Cache, server: ScriptedServer) -> None:
    sizes = {"/a/x/1": 1000, "/a/x/2": 2000, "/a/y/3": 9000, "/b/z/4": 100}
    for path, size in sizes.items():
        cache.read(server.put(path, bytes(size)))
    lines = [line.split() for line in run("ls", "--tree").lines[1:]]
    assert lines == [
        ["12.1", "kB", "4", f"{server.url}/"],
        ["12", "kB", "3", "a/"],
        ["9", "kB", "1", "y/"],
        ["3", "kB", "2", "x/"],
        ["100", "B", "1", "b/z/"],
    ]
    assert [line.split() for line in run("ls", "--tree", "--limit", 2).lines[1:]] == lines[:2]
    assert [one["entries"] for one in run("ls", "--tree", "--json", "--filter", "size>1kB").json] == [2, 1, 1]
    assert run("ls", "--tree", "--sort", "size").code == 2


@pytest.mark.parametrize("options", [(), ("--sort", "size"), ("-q",), ("--filter", "size>0")])
def test_a_limit_ends_the_list(run: Run, cache: Cache, options: tuple[str, ...]) -> None:
    for number in range(5):
        cache.put(f"{number}", b"v" * (number + 1))
    assert len(run("ls", *options, "--limit", 2).lines) == (2 if "-q" in options else 3)


def test_a_mistyped_verb_is_told_what_was_perhaps_meant(run: Run) -> None:
    for line in (["pul", "x"], ["help", "pul"]):
        ran = run(*line)
        assert (ran.code, "did you mean `forebay pull`?" in ran.err) == (2, True)
    assert "did you mean" not in run("qqqq").err


def test_a_hint_names_the_variable_that_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BUDGET", "lots")
    assert "run `unset FOREBAY_BUDGET`" in run("pull", "http://127.0.0.1:9/x").err
