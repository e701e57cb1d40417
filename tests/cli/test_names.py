"""What a name means: a URL, `space:key`, or the key of a value; and that no output gives a secret away, or drives a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Cache, errors
from forebay.remote.filesystems.clients import arrow_from_uri
from forebay.testing import ScriptedServer

from .conftest import Run, Terminal

SECRET = "5ecre7-0f-m1ne"
SIGNED = f"X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}"


# -- values ------------------------------------------------------------------------------------------------------------


def test_a_value_is_known_by_its_key(cache: Cache) -> None:
    cache.put("x", b"value")
    entry = cache.entry("x")
    assert entry is not None
    assert (entry.space, entry.name) == ("values", "values:x")
    cache.pin("x")
    assert [entry.life for entry in cache.entries()] == ["pinned"]
    cache.unpin("x")
    assert cache.evict("x").removed == ("values:x",)
    for call in (cache.evict, cache.pin, cache.unpin, cache.hold):
        with pytest.raises(errors.NotCached, match="'x' is not in the cache"):
            call("x")


def test_a_value_is_known_by_its_key_on_the_command_line(run: Run, cache: Cache) -> None:
    cache.put("x", b"value")
    assert run("ls", "-q", "x").lines == ["values:x"]
    assert run("pin", "x").out == "pinned: values:x\n"
    assert run("unpin", "--json", "x").json == {"unpinned": ["values:x"], "missing": []}
    ran = run("path", "x")
    assert (ran.code, "a small value that a program stored" in ran.err, "read it in a program" in ran.err) == (2, True, True)
    assert "1 entry would be removed" in run("rm", "-n", "x").out
    ran = run("rm", "x")
    assert (ran.code, "1 entry removed" in ran.out) == (0, True)
    for verb in (("rm", "x"), ("rm", "-n", "x"), ("pin", "x"), ("unpin", "x"), ("path", "x")):
        ran = run(*verb)
        assert (ran.code, "'x' is not in the cache" in ran.err) == (3, True), verb


def test_an_ambiguous_name_is_an_error_that_shows_both(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"remote")
    cache.read(url)
    cache.put(url, b"value")
    calls: list[Callable[[str], Any]] = [cache.evict, cache.pin, cache.unpin, cache.hold, cache.entry]
    for call in calls:
        with pytest.raises(errors.Ambiguous) as refused:
            call(url)
        assert refused.value.names == [f"urls:{url}", f"values:{url}"]
        assert isinstance(refused.value, KeyError)
    for verb in ("rm", "pin", "unpin", "path"):
        ran = run(verb, url)
        assert (ran.code, f"'urls:{url}'" in ran.err, f"'values:{url}'" in ran.err) == (3, True, True)
    assert len(cache.entries()) == 2
    assert bytes(cache.read(url)) == b"remote"
    assert run("rm", f"values:{url}").code == 0
    assert [entry.name for entry in cache.entries()] == [url]
    cache.put(url, b"value")
    assert cache.evict(f"urls:{url}").removed == (url,)
    assert bytes(cache.get(url) or b"") == b"value"


def test_what_a_space_has_comes_before_a_value_that_is_called_alike(run: Run, cache: Cache) -> None:
    cache.space("s").put("k", b"in the space")
    cache.put("s:k", b"value")
    assert [entry.name for name in ("s:k", "values:s:k") if (entry := cache.entry(name))] == ["s:k", "values:s:k"]
    assert (run("rm", "s:k").code, bytes(cache.get("s:k") or b"")) == (0, b"value")
    cache.space("s").put("k", b"in the space")
    entry = next(entry for entry in cache.entries("s"))
    assert cache.evict(entry).removed == ("s:k",)  # what `entries` gave means itself
    assert cache.evict("s:k").removed == ("values:s:k",)


def test_looking_for_a_name_makes_no_space(cache: Cache) -> None:
    before = cache.stats().spaces
    assert cache.entry("never-put") is None
    assert cache.entry("urls:x") is None
    assert cache.entry("\ud800") is None
    assert cache.stats().spaces == before


# -- a query -----------------------------------------------------------------------------------------------------------


def test_ls_finds_a_url_with_a_query(run: Run, cache: Cache, server: ScriptedServer) -> None:
    for version in (3, 4):
        server.put("/a", b"%d" % version)
        cache.read(f"{server.url}/a?v={version}")
    (name,) = run("ls", "-q", f"{server.url}/a?v=3").lines
    assert bytes(Path(run("path", name).out.strip()).read_bytes()) == b"3"
    assert len(run("ls", "-q", f"{server.url.upper().replace('HTTP', 'http')}/a").lines) == 2
    assert run("rm", f"{server.url}/a?v=3").code == 0
    assert run("ls", "-q", f"{server.url}/a?v=3").lines == []


def test_ls_finds_a_local_file_by_its_path(run: Run, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "near.bin").write_bytes(b"near")
    monkeypatch.chdir(tmp_path)
    assert run("pull", "near.bin").code == 0
    assert run("ls", "-q", "near.bin").lines == [f"file://{tmp_path}/near.bin"]


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbosity", ["warning", "debug"])
def test_no_output_gives_a_secret_away(
    run: Run, cache: Cache, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbosity: str
) -> None:
    monkeypatch.setenv("FOREBAY_VERBOSITY", verbosity)
    monkeypatch.setenv("FOREBAY_PROGRESS", "1")
    server.put("/good", b"good")
    good, gone = f"{server.url}/good?{SIGNED}", f"{server.url}/gone?{SIGNED}"
    user = f"http://me:{SECRET}@{server.url.removeprefix('http://')}/gone"
    listing = tmp_path / "urls"
    listing.write_text(f"{good}\n{gone}\n{user}\n")
    verbs = [
        *(("pull", good, gone, user), ("pull", "--json", good, gone, user), ("warm", listing), ("warm", "--json", listing)),
        *(("ls", good), ("path", good), ("path", "--json", good), ("path", gone), ("pin", good, gone), ("unpin", "--json", good, gone)),
        *(
            ("pull", good, good.replace("?", "/?"), "--to", tmp_path / "to"),
            ("pull", gone + "/"),
            ("warm", good),
            ("warm", f"s3x://k:{SECRET}@b/x"),
        ),
        *(("rm", "-n", good), ("rm", good, gone), ("push", tmp_path, f"{gone}/"), ("pull", "--sha256", "0" * 64, good), ("ls", gone)),
    ]
    for verb in verbs:
        ran = run(*verb)
        assert SECRET not in ran.out + ran.err, verb
        assert ran.code == 0 or "error: " in ran.err, verb
    with pytest.raises(errors.NotCached) as refused:
        cache.pin(gone)
    assert SECRET not in str(refused.value) + json.dumps(refused.value.facts)


def test_names_cannot_drive_a_terminal(cache: Cache, tmp_path: Path) -> None:
    """With a terminal, colours and all: no byte of a key below 0x20, but line ends; no 0x9b, the other CSI."""
    evil = "evil\x1b]0;owned\x07\x1b[2J\r\b\x9b31m\u202e"
    cache.put(evil, b"x")
    (tmp_path / evil).write_bytes(b"x")
    for verb in (("ls",), ("rm", "-n", evil), ("pin", evil), ("path", evil), ("pull", tmp_path / evil), ("pull", tmp_path / (evil + "2"))):
        with Terminal(*verb) as terminal:
            terminal.end()
            seen = terminal.seen
        for sign in ("\x1b]0", "\x1b[2J", "\x07", "\b", "\x9b", "\u202e"):
            assert sign not in seen.replace("\x1b[2K", ""), (verb, sign)
        assert "evil" in seen, verb


def test_arguments_that_are_no_text(run: Run, cache: Cache, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe")
    for verb in (("ls", name), ("path", name), ("rm", name), ("pin", name), ("pull", str(tmp_path / name)), ("ls", "--space", name)):
        ran = run(*verb)
        assert "report it" not in ran.err, (verb, ran)
    assert run("path", name).code == 3


def test_claims_show_no_secret_of_their_remotes(run: Run, home: Path, tmp_path: Path) -> None:
    with forebay.claim(tmp_path / "data", f"s3://me:{SECRET}@bucket/data?{SIGNED}"):
        out = run("claims", "--json").out
    assert "bucket/data" in out
    assert SECRET not in out


def test_names_that_are_no_url_quite_give_no_secret_away(run: Run, cache: Cache, server: ScriptedServer, tmp_path: Path) -> None:
    blank = f"{server.url}/a b?{SECRET}"
    listing = tmp_path / "urls"
    listing.write_text(f"'{server.url}/x?{SIGNED}'\nhttp:/h/x?{SIGNED}\n{blank}\n")
    names = [f"'{server.url}/x?{SIGNED}'", f" {server.url}/x?{SIGNED}", f"http:/h/x?{SIGNED}", f"https:h/x?{SIGNED}", blank]
    verbs = [(verb, *names) for verb in ("pull", "rm", "pin", "unpin")] + [("path", blank), ("warm", listing), ("warm", "--json", listing)]
    for verb in [*verbs, ("pull", "--json", *names), ("pin", "--json", *names)]:
        ran = run(*verb)
        assert SECRET not in ran.out + ran.err, verb
        assert ran.code != 0, verb
    for name in names:
        with pytest.raises(errors.NotCached) as refused:
            cache.pin(name)
        assert SECRET not in str(refused.value) + json.dumps(refused.value.facts)
        with pytest.raises(errors.ForebayError) as failed:
            cache.pull(name)
        assert SECRET not in str(failed.value) + json.dumps(failed.value.facts)


def test_doctor_tells_no_value_of_a_variable_that_it_does_not_know(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_FOO", SECRET)
    ran = run("doctor")
    assert ("FOREBAY_FOO" in ran.out + ran.err, SECRET in ran.out + ran.err) == (True, False)


def test_pyarrow_tells_no_secret_of_a_url_that_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="forebay")
    assert arrow_from_uri(f"htp://joe:{SECRET}@h/x?{SECRET}") is None
    assert SECRET not in caplog.text
    assert "pyarrow has no filesystem" in caplog.text
