"""`pull`, `warm` and `path`: what they fetch, what they say, how they end."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import threading
from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import Request, ScriptedServer
from tests.harness import answers_of
from tests.servers.nginx import nginx

from .conftest import Run

BODY = bytes(range(256)) * 400


def urls_of(server: ScriptedServer, *names: str) -> list[str]:
    return [server.put(f"/{name}", name.encode() + BODY) for name in names]


# -- pull --------------------------------------------------------------------------------------------------------------


def test_pull_fetches_once_and_says_one_line_without_a_terminal(run: Run, server: ScriptedServer, cache: Cache) -> None:
    urls = urls_of(server, "a.bin", "b.bin")
    for said in (r"2 URLs: 2 fetched; 205 kB in \d\.\d s\n", r"2 URLs: 2 in the cache already\n"):
        ran = run("pull", *urls)
        assert (ran.code, ran.out) == (0, "")
        assert re.fullmatch(said, ran.err)
    assert server.gets == 2
    assert bytes(cache.read(urls[0])) == b"a.bin" + BODY


def test_pull_makes_the_cache(run: Run, server: ScriptedServer, home: Path) -> None:
    assert not home.exists()
    assert run("pull", *urls_of(server, "a")).code == 0
    assert (home / "FORMAT").exists()


def test_pull_tells_what_it_did_as_json(run: Run, server: ScriptedServer) -> None:
    good, other = urls_of(server, "a", "b")
    run("pull", other)
    ran = run("pull", "--json", good, other, f"{server.url}/none")
    assert ran.code == 1
    found = {record["url"]: record for record in ran.json}
    assert [found[url]["state"] for url in (good, other, f"{server.url}/none")] == ["fetched", "kept", "failed"]
    assert found[good]["size"] == 1 + len(BODY)
    assert "404" in found[f"{server.url}/none"]["error"]


def test_what_fails_is_listed_and_does_not_stop_the_rest(run: Run, server: ScriptedServer) -> None:
    good = urls_of(server, "a")[0]
    ran = run("pull", f"{server.url}/x", good, f"{server.url}/y")
    assert ran.code == 1
    errors = [line for line in ran.err.splitlines() if line.startswith("error:")]
    assert [name in "".join(errors) for name in ("/x", "/y", "/a")] == [True, True, False]
    assert ran.err.count("\n hint: ") == len(errors) == 2
    assert run("path", good).code == 0


def test_a_url_that_is_given_twice_is_one(run: Run, server: ScriptedServer) -> None:
    url = urls_of(server, "a")[0]
    assert len(run("pull", "--json", url, url).json) == 1


def test_offline_is_its_own_code(run: Run, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = urls_of(server, "a")[0]
    monkeypatch.setenv("FOREBAY_OFFLINE", "1")
    ran = run("pull", url)
    assert ran.code == 3
    assert server.requests == []


def test_refresh_asks_the_source(run: Run, server: ScriptedServer) -> None:
    url = urls_of(server, "a")[0]
    run("pull", url)
    asked = len(server.requests)
    run("pull", url)
    assert len(server.requests) == asked
    assert run("pull", "--refresh", url).code == 0
    assert len(server.requests) > asked
    assert answers_of(server) == (1, 1)  # nothing new: nothing came
    server.put("/a", b"new")
    run("pull", "--refresh", url)
    assert answers_of(server) == (2, 1)


def test_the_sum_is_checked(run: Run, server: ScriptedServer) -> None:
    url = urls_of(server, "a")[0]
    right = hashlib.sha256(b"a" + BODY).hexdigest()
    wrong = "0" * 64
    ran = run("pull", "--sha256", wrong, url)
    assert ran.code == 1
    assert wrong in ran.err
    assert right in ran.err
    assert run("path", url).code == 3
    assert run("pull", "--sha256", right.upper(), url).code == 0


@pytest.mark.parametrize("arguments", [("--sha256", "abc", "u"), ("--sha256", "0" * 64, "u", "v"), ("--jobs", "0", "u"), ()])
def test_a_pull_that_makes_no_sense_is_a_usage_error(run: Run, home: Path, arguments: tuple[str, ...]) -> None:
    ran = run("pull", *arguments)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 2
    assert not home.exists()


def test_to_a_file(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    url = urls_of(server, "a")[0]
    target = tmp_path / "deep" / "copy.bin"
    assert run("pull", url, "--to", target).code == 0
    assert target.read_bytes() == b"a" + BODY
    assert run("pull", url, "--to", target).code == 0  # what stands there is what would be written
    target.write_bytes(b"mine")  # a copy: writing to it touches nothing of the cache
    assert run("verify").code == 0
    ran = run("pull", url, "--to", target)
    assert (ran.code, "--overwrite" in ran.err, target.read_bytes()) == (1, True, b"mine")
    assert run("pull", url, "--to", target, "--overwrite").code == 0
    assert target.read_bytes() == b"a" + BODY
    assert list(target.parent.iterdir()) == [target]


def test_to_a_directory(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    urls = urls_of(server, "a", "b%20c")
    (tmp_path / "out").mkdir()
    assert run("pull", urls[0], "--to", tmp_path / "out").code == 0
    assert run("pull", *urls, "--to", f"{tmp_path}/new/").code == 0
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("[on]*/*")) == ["new/a", "new/b c", "out/a"]


@pytest.mark.parametrize("names", [("x/same", "y/same"), ("x/same/", "y/same"), ("a/%2E%2E",), ("a%2Fb", "c")])
def test_names_that_a_directory_cannot_hold(run: Run, server: ScriptedServer, tmp_path: Path, names: tuple[str, ...]) -> None:
    ran = run("pull", *(f"{server.url}/{name}" for name in names), "--to", f"{tmp_path}/out/")
    assert ran.code == 2
    assert server.requests == []
    assert not (tmp_path / "out").exists()


def test_a_copy_that_fails_leaves_nothing(run: Run, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, refuse)
    ran = run("pull", *urls_of(server, "a"), "--to", f"{tmp_path}/out/")
    assert ran.code == 1
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("to", ["file/a", "file/deeper/", "out/"])
def test_to_where_no_file_can_be_is_told_before_anything_is_fetched(run: Run, server: ScriptedServer, tmp_path: Path, to: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out" / "a").mkdir(parents=True)
    ran = run("pull", *urls_of(server, "a"), "--to", f"{tmp_path}/{to}")
    assert ran.code == 2
    assert "--to" in ran.err
    assert server.requests == []


def test_what_has_no_room_is_a_failure_but_for_a_copy(
    run: Run, server: ScriptedServer, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cache(home, budget=50_000):
        pass
    url = urls_of(server, "a")[0]
    ran = run("pull", url)
    assert ran.code == 1
    assert "`forebay budget SIZE`" in ran.err
    assert run("pull", url, "--to", tmp_path / "copy").code == 0
    assert (tmp_path / "copy").read_bytes() == b"a" + BODY
    caplog.clear()  # its records hold the errors, and these the store


def test_pin_keeps_what_it_fetches_and_what_was_there(run: Run, server: ScriptedServer, cache: Cache) -> None:
    urls = urls_of(server, "a", "b", "c")
    run("pull", urls[0])
    assert run("pull", "--pin", *urls[:2]).code == 0
    assert run("pull", urls[2]).code == 0
    assert {entry.name: entry.life for entry in cache.entries()} == {urls[0]: "pinned", urls[1]: "pinned", urls[2]: "cached"}
    assert run("pull", *urls).code == 0
    assert run("ls", "-q", "-f", "life=pinned").lines == urls[:2]


def test_what_has_no_room_cannot_be_pinned(run: Run, server: ScriptedServer, home: Path, tmp_path: Path) -> None:
    with Cache(home, budget=50_000):
        pass
    ran = run("pull", "--pin", *urls_of(server, "a"), "--to", tmp_path / "copy")
    assert (ran.code, "50,000" in ran.err, (tmp_path / "copy").exists()) == (1, True, False)


# -- pull of several ---------------------------------------------------------------------------------------------------


def test_several_from_nginx_are_fetched_and_copied(run: Run, cache: Cache, tmp_path: Path) -> None:
    bodies = {f"{number}.bin": os.urandom(size) for number, size in enumerate([0, 1, 3_000, 100_000, 700_000, 3_000_000] * 5)}
    with nginx(tmp_path / "nginx") as server:
        urls = [server.put(name, body) for name, body in bodies.items()]
        ran = run("pull", "--json", *urls, "--to", f"{tmp_path}/out/")
        assert ran.code == 0
        sizes = {record["url"]: record["size"] for record in ran.json if record["state"] != "failed"}
    assert sizes == {url: len(body) for url, body in zip(urls, bodies.values(), strict=True)}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == bodies
    assert [bytes(view) for view in cache.read_many(urls)] == list(bodies.values())


@pytest.mark.parametrize("verb", ["pull", "warm"])
def test_small_objects_that_are_under_way_take_no_thread_each(run: Run, server: ScriptedServer, tmp_path: Path, verb: str) -> None:
    urls = [server.put(f"/{number}", BODY, stall_after=10) for number in range(8)]
    names: set[str] = set()

    def note(request: Request) -> None:
        if server.gets == len(urls):
            names.update(thread.name for thread in threading.enumerate())
            server.go.set()

    server.on_request = note
    (tmp_path / "urls").write_text("\n".join(urls))
    assert run(verb, *(urls if verb == "pull" else [tmp_path / "urls"]), "--jobs", "8").code == 0
    assert "http-transfers" in names
    assert not [name for name in names if name.startswith("forebay-")]


def test_together_they_may_exceed_the_budget(run: Run, server: ScriptedServer, home: Path, tmp_path: Path) -> None:
    """Two are in use at a time, and three fit: while more are copied than fit, others are fetched past the cache."""
    with Cache(home, budget=400_000):
        pass
    bodies = {f"{number}": os.urandom(100_000) for number in range(20)}
    urls = [server.put(f"/{name}", body) for name, body in bodies.items()]
    assert run("pull", *urls, "--jobs", "1", "--to", f"{tmp_path}/out/").code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == bodies
    assert server.gets == len(urls)


def test_several_that_can_have_no_room_are_copied(
    run: Run, server: ScriptedServer, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cache(home, budget=50_000):
        pass
    urls = urls_of(server, "a", "b", "c")
    small = server.put("/small", b"small")
    ran = run("pull", "--json", *urls, small, "--to", f"{tmp_path}/out/")
    assert ran.code == 0
    assert {record["url"]: (record["state"], record["error"]) for record in ran.json} == {
        **dict.fromkeys(urls, ("past", None)),
        small: ("fetched", None),
    }
    copies = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert copies == {name: name.encode() + BODY for name in ("a", "b", "c")} | {"small": b"small"}
    caplog.clear()  # its records hold the errors, and these the store


def test_a_copy_that_fails_stops_no_other(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    urls = urls_of(server, "a", "b", "c")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b").write_bytes(b"mine")
    ran = run("pull", "--json", *urls, "--to", f"{tmp_path}/out/")
    assert ran.code == 1
    assert {record["url"]: record["state"] for record in ran.json} == {urls[0]: "fetched", urls[1]: "failed", urls[2]: "fetched"}
    copies = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert copies == {"a": b"a" + BODY, "b": b"mine", "c": b"c" + BODY}


def test_two_spellings_of_one_object_are_fetched_once(run: Run, server: ScriptedServer) -> None:
    url = urls_of(server, "a")[0]
    other = url.replace("http://", "HTTP://")
    assert [record["state"] for record in run("pull", "--json", url, other).json] == ["fetched", "fetched"]
    assert server.gets == 1


def test_an_object_that_stalls_does_not_hold_up_the_others(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    stalling = server.put("/stalling", BODY, stall_after=10)
    urls = urls_of(server, *(f"n{number}" for number in range(20)))

    def note(request: Request) -> None:
        if server.gets == 1 + len(urls):
            server.go.set()

    server.on_request = note
    assert run("pull", stalling, *urls, "--jobs", "2").code == 0
    assert server.gets == 1 + len(urls)


# -- warm --------------------------------------------------------------------------------------------------------------


def test_s40_warm_lists_failures_and_goes_on_where_it_was(run: Run, server: ScriptedServer, tmp_path: Path) -> None:
    urls = urls_of(server, *(f"n{i}" for i in range(20)))
    missing = f"{server.url}/later"
    listing = tmp_path / "urls.txt"
    listing.write_text("# data\n\n" + "\n".join([*urls, urls[0], missing]) + "\n")
    ran = run("warm", listing, "--jobs", "16")
    assert ran.code == 1
    assert missing in ran.err
    assert "1 of 21 failed" in ran.err
    assert server.gets == 21
    server.put("/later", b"here now")
    ran = run("warm", "--json", listing)
    assert ran.code == 0
    assert {record["state"] for record in ran.json if record["url"] != missing} == {"kept"}
    assert server.gets == 22


def test_warm_from_standard_input(run: Run, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", [f"{url}\n" for url in urls_of(server, "a", "b")])
    assert run("warm", "-").code == 0
    assert server.gets == 2


def test_warm_of_one_object_under_two_spellings(run: Run, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    [url] = urls_of(server, "a")
    other = url.replace("http:", "HTTP:") + "#part"
    for state in ("fetched", "kept"):
        monkeypatch.setattr(sys, "stdin", [f"{url}\n", f"{other}\n"])
        ran = run("warm", "-", "--json")
        assert ran.code == 0
        assert [(record["url"], record["state"], record["size"]) for record in ran.json] == [(url, state, 1 + len(BODY))] * 2
    assert server.gets == 1


def test_warm_all_below_a_directory(run: Run, cache: Cache, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "a").write_bytes(b"1")
    (data / "deep" / "b").write_bytes(b"2")
    assert run("warm", data).code == 0
    assert sorted(entry.size for entry in cache.entries()) == [1, 1]


@pytest.mark.parametrize(
    ("source", "why"), [("", "neither"), ("http://127.0.0.1:9/dir/", "HTTP servers list no objects"), ("binary", "not a text file of URLs")]
)
def test_warm_of_what_is_no_list(run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    ran = run("warm", source)
    assert ran.code == 2
    assert why in ran.err
    assert not home.exists()


def test_warm_reads_a_pipe(run: Run, server: ScriptedServer, cache: Cache) -> None:
    ours, its = os.pipe()
    [url] = urls_of(server, "a")
    os.write(its, url.encode())
    os.close(its)
    assert run("warm", f"/dev/fd/{ours}").code == 0  # as in `forebay warm <(list-shards)`
    os.close(ours)
    assert [entry.name for entry in cache.entries()] == [url]


def test_warm_of_nothing_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("warm", tmp_path / "none").code == 2
    assert run("warm", tmp_path / "empty").code == 2


# -- path --------------------------------------------------------------------------------------------------------------


def test_path_shows_the_file_and_never_fetches(run: Run, server: ScriptedServer) -> None:
    url = urls_of(server, "a.tar")[0]
    run("pull", url)
    asked = len(server.requests)
    ran = run("path", url)
    assert ran.code == 0
    assert Path(ran.out.strip()).read_bytes() == b"a.tar" + BODY
    assert run("path", "--json", url).json == {"name": url, "path": ran.out.strip()}
    absent = run("path", f"{server.url}/none")
    assert absent.code == 3
    assert absent.out == ""
    assert len(server.requests) == asked


def test_path_of_the_cache_itself(run: Run, cache: Cache) -> None:
    assert run("path").lines == [str(cache.path)]


def test_a_value_has_no_path(run: Run, cache: Cache) -> None:
    cache.put("k", b"v")
    ran = run("path", "values:k")
    assert ran.code == 2
    assert "a small value" in ran.err


def test_a_large_value_has_a_path(run: Run, cache: Cache) -> None:
    cache.put("k", b"v" * 20_000)
    (path,) = run("path", "values:k").lines
    assert Path(path).read_bytes() == b"v" * 20_000
