"""`pull URL/`: a directory, whole, with one bar; a part of it; a copy of one's own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer
from tests.remote_directories import FILES, MARKER, TOTAL, files_of, http_directory, marker_of

from .conftest import HANG, Run, Terminal

REQUESTS = len(FILES) + 2
"""Each file, the manifest, and once more the empty file, of which no range can be had."""
COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def url(server: ScriptedServer) -> str:
    return http_directory(server, FILES)


def test_pull_fetches_a_directory_once(run: Run, url: str, server: ScriptedServer, cache: Cache) -> None:
    for said in ("1 URL: 1 fetched; 551 kB in ", "1 URL: 1 in the cache already\n"):
        ran = run("pull", url)
        assert (ran.code, ran.out, ran.err.startswith(said)) == (0, "", True)
    assert server.gets == REQUESTS
    with cache.directory(url) as path:
        assert files_of(path) == FILES
    assert server.gets == REQUESTS


def test_pull_tells_what_it_did_as_json(run: Run, url: str, server: ScriptedServer) -> None:
    ran = run("pull", "--json", url)
    assert [(one["url"], one["state"], one["size"]) for one in ran.json] == [(url, "fetched", TOTAL)]
    ran = run("pull", "--json", url, f"{server.url}/none/")
    assert ran.code == 1
    found = {one["url"]: one for one in ran.json}
    assert (found[url]["state"], found[f"{server.url}/none/"]["state"]) == ("kept", "failed")


@pytest.mark.parametrize("dry_run", [True, False])
def test_clear_takes_a_directory_and_its_files_at_once(run: Run, url: str, cache: Cache, dry_run: bool) -> None:
    """The directory goes first: while it stands its files are in use."""
    run("pull", url)
    count = len(cache.entries())
    if dry_run:
        assert run("clear", "-n").lines[-1].startswith(f"{count} entries would be removed, ")
        return
    ran = run("clear", "--yes", "--json")
    assert (ran.code, ran.json["spared"], len(ran.json["removed"])) == (0, [], count)
    assert cache.entries() == []


def test_pin_keeps_a_directory(run: Run, url: str, cache: Cache) -> None:
    assert run("pull", "--pin", url).code == 0
    assert run("ls", "-q", "-f", "life=pinned").lines == [f"directories:{url}"]


def test_pull_takes_include_and_exclude(run: Run, url: str, server: ScriptedServer, cache: Cache) -> None:
    ran = run("pull", url, "--include", "model-*", "--include", "*.json", "--exclude", "*-00002*")
    assert (ran.code, ran.err.startswith("1 URL: 1 fetched")) == (0, True)
    assert {entry.key.removeprefix(url) for entry in cache.entries("urls")} == {"model-00001.safetensors", "config.json"}
    assert run("pull", url, "--include", "nothing*").code == 1


def test_refresh_asks_the_source(run: Run, url: str, server: ScriptedServer, cache: Cache) -> None:
    run("pull", url)
    http_directory(server, FILES | {"config.json": b"{next}"})
    run("pull", url)
    with cache.directory(url) as path:
        assert files_of(path) == FILES
    assert run("pull", "--refresh", url).code == 0
    with cache.directory(url) as path:
        assert files_of(path) == FILES | {"config.json": b"{next}"}


def test_to_a_directory(run: Run, url: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "copy"
    for _ in range(2):
        assert run("pull", url, "--to", target).code == 0
        assert files_of(target) == FILES
    assert os.listdir(target.parent) == ["copy"]
    (target / "notes").write_bytes(b"mine")
    assert run("pull", url, "--to", f"{target}/").code == 0  # beside what is there
    assert files_of(target) == FILES | {"notes": b"mine"}


def test_a_part_to_a_directory(run: Run, url: str, tmp_path: Path) -> None:
    assert run("pull", url, "--to", tmp_path / "copy", "--exclude", "model-*").code == 0
    assert files_of(tmp_path / "copy") == {name: body for name, body in FILES.items() if not name.startswith("model-")}


def test_files_of_others_are_not_overwritten(run: Run, url: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_bytes(b"mine")
    ran = run("pull", url, "--to", tmp_path / "mine")
    assert ran.code == 1
    assert "config.json" in ran.err
    assert "--overwrite" in ran.err
    assert files_of(tmp_path / "mine") == {"config.json": b"mine"}
    assert run("pull", url, "--to", tmp_path / "mine", "--overwrite").code == 0
    assert files_of(tmp_path / "mine") == FILES


def test_objects_and_directories_together(run: Run, url: str, server: ScriptedServer, tmp_path: Path) -> None:
    plain = server.put("/plain.bin", b"plain")
    other = http_directory(server, {"x": b"x"}, "/other")
    assert run("pull", url, plain, other, "--to", tmp_path / "all").code == 0
    found = files_of(tmp_path / "all")
    assert found == {f"step_100/{name}": body for name, body in FILES.items()} | {"plain.bin": b"plain", "other/x": b"x"}


def test_a_local_directory_is_kept(run: Run, home: Path, tmp_path: Path) -> None:
    """As one on a network mount."""
    (tmp_path / "near" / "sub").mkdir(parents=True)
    (tmp_path / "near" / "sub" / "file").write_bytes(b"near")
    assert run("pull", f"{tmp_path}/near/").code == 0
    assert [path.read_bytes() for path in (home / "trees").rglob("file")] == [b"near"]


def test_without_room_in_the_cache(run: Run, url: str, tmp_path: Path, home: Path) -> None:
    with Cache(home, budget=300_000):
        pass
    ran = run("pull", url)
    assert ran.code == 1
    assert "`forebay budget SIZE`" in ran.err
    ran = run("pull", "--json", url, "--to", tmp_path / "copy")
    assert (ran.code, [one["state"] for one in ran.json]) == (0, ["past"])
    assert files_of(tmp_path / "copy") == FILES


@pytest.mark.parametrize(
    "arguments",
    [
        ("http://h/a.bin", "--include", "*"), ("http://h/a.bin", "--exclude", "*"), ("http://h/a.bin", "--overwrite"),
        ("http://h/a/", "--sha256", "0" * 64), ("http://h/x/a/", "http://h/y/a/", "--to", "out"), ("http://h/a/", "--include", ""),
    ],
)  # fmt: skip
def test_a_pull_that_makes_no_sense_is_a_usage_error(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run("pull", *arguments)
    assert ran.code == 2, ran.err
    assert len(ran.err.splitlines()) == 2


def test_a_target_that_cannot_be_is_seen_before_anything_is_fetched(run: Run, url: str, server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run("pull", url, "--to", target).code == 2
    assert server.requests == []


def test_offline_is_its_own_code(run: Run, url: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_OFFLINE", "1")
    assert run("pull", url).code == 3
    assert server.requests == []


def test_what_is_not_whole_is_told(run: Run, url: str, server: ScriptedServer) -> None:
    server.put(f"/run/step_100/{MARKER}", marker_of(FILES, complete=False))
    ran = run("pull", url)
    assert ran.code == 1
    assert "forebay push" in ran.err


def test_path_of_a_directory(run: Run, url: str, server: ScriptedServer) -> None:
    assert run("path", url).code == 3
    run("pull", url)
    for name in (url, f"directories:{url}"):
        ran = run("path", name)
        assert ran.code == 0, ran.err
        assert files_of(ran.lines[0]) == FILES
    assert server.gets == REQUESTS


def test_a_pulled_directory_is_listed_and_removed(run: Run, url: str, home: Path) -> None:
    run("pull", url)
    assert f"directories:{url}" in run("ls", "-q").lines
    assert run("rm", f"directories:{url}").code == 0
    assert [name for name in run("ls", "-q").lines if not name.startswith("listings:")] == []


# -- at a terminal -----------------------------------------------------------------------------------------------------


def test_one_bar_for_all_files(home: Path, url: str) -> None:
    with Terminal("pull", url) as terminal:
        assert terminal.end() == 0, terminal.seen
        shown = COLOUR.sub("", terminal.seen)
    assert "step_100" in shown
    assert "fetched" in shown
    assert "551 kB" in shown
    assert "model-00001" not in shown
    assert "total" not in shown


def test_the_second_terminal_waits_and_says_for_whom(home: Path, url: str, server: ScriptedServer) -> None:
    server.objects["/run/step_100/model-00001.safetensors"].stall_after = 100_000
    with Terminal("pull", url) as first:
        assert server.stalled.wait(HANG)
        with Terminal("pull", url) as second:
            second.read(until=f"for process {first.process.pid}")
            server.go.set()
            assert (first.end(), second.end()) == (0, 0)
            assert "kept" in COLOUR.sub("", second.seen)
    assert server.gets == REQUESTS


def test_ctrl_c_ends_it_at_once_and_the_next_goes_on(home: Path, url: str, server: ScriptedServer) -> None:
    server.objects["/run/step_100/model-00001.safetensors"].stall_after = 100_000
    with Terminal("pull", url) as first:
        assert server.stalled.wait(HANG)
        first.process.send_signal(signal.SIGINT)
        assert first.end() == 130
    server.go.set()
    server.objects["/run/step_100/model-00001.safetensors"].stall_after = None
    with Terminal("pull", url) as again:
        assert again.end() == 0
    with Cache(home, offline=True) as cache, cache.directory(url) as path:
        assert files_of(path) == FILES


@pytest.mark.parametrize("how", ["path", "url"])
def test_a_local_directory_without_its_slash(run: Run, tmp_path: Path, how: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/a").write_bytes(b"a")
    ran = run("pull", tmp_path / "there" if how == "path" else (tmp_path / "there").as_uri())
    assert ran.code == 1
    assert "there is no such object, but a directory" in ran.err
    assert "a slash at the end" in ran.err


def test_what_stands_in_the_way_is_told_in_words_of_the_command_line(run: Run, url: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").mkdir()
    ran = run("pull", url, "--to", target)
    assert (ran.code, "overwrite=True" in ran.err, "--overwrite" in ran.err) == (1, False, True)


@pytest.mark.parametrize("scheme", ["http", "https", "s3"])
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_url_that_names_nothing(run: Run, tmp_path: Path, scheme: str, verb: str) -> None:
    ran = run(*([verb] if verb == "pull" else [verb, tmp_path]), f"{scheme}://")
    what = "bucket" if scheme == "s3" else "host"
    assert (ran.code, f"{scheme}:// names no {what}" in ran.err) == (2, True)
