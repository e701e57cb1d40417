"""`cat`: the bytes of objects on standard output, whole and in order, and nothing but them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from forebay import Cache
from forebay.testing import ScriptedServer

from .conftest import COMMAND, HANG, Run

BINARY = bytes(range(256)) * 20


def cat(*urls: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([*COMMAND, "cat", *urls], check=False, timeout=HANG, **pipes)  # type: ignore[call-overload, no-any-return]


def test_bytes_come_as_they_are_and_objects_in_their_order(server: ScriptedServer, home: Path) -> None:
    urls = [server.put(f"/{number}", bytes([number]) + BINARY) for number in range(3)]
    for _ in range(2):
        ran = cat(urls[2], urls[0], urls[2])
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert ran.stdout == b"\2" + BINARY + b"\0" + BINARY + b"\2" + BINARY
    assert server.gets == 2
    assert (home / "FORMAT").exists()


def test_it_stops_at_the_first_that_fails(run: Run, cache: Cache, server: ScriptedServer) -> None:
    good, last = server.put("/a", b"first"), server.put("/b", b"last")
    ran = run("cat", good, f"{server.url}/none", last)
    assert (ran.code, ran.out) == (1, "first")
    assert "404" in ran.err
    assert len(ran.err.splitlines()) == 2
    assert run("path", last).code == 3


def test_a_directory_is_refused_before_anything_is_fetched(run: Run, server: ScriptedServer, home: Path) -> None:
    for directory in (f"{server.url}/dir/", home.parent):
        ran = run("cat", server.put("/a", b"x"), directory)
        assert (ran.code, "is a directory" in ran.err, ran.out, server.requests, home.exists()) == (2, True, "", [], False)


def test_refresh_asks_the_source_again(run: Run, cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"old")
    run("cat", url)
    server.put("/a", b"new")
    assert (run("cat", url).out, run("cat", "--refresh", url).out) == ("old", "new")


def test_a_local_file_is_not_stored(run: Run, cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    assert run("cat", tmp_path / "file").out == "here"
    assert run("ls", "-q").lines == []


def test_a_reader_that_has_enough_ends_it_quietly(cache: Cache, server: ScriptedServer) -> None:
    url = server.put("/a", bytes(4_000_000))
    ran = subprocess.Popen([*COMMAND, "cat", url, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout is not None
    assert ran.stderr is not None
    ran.stdout.read(10)
    ran.stdout.close()
    assert (ran.stderr.read(), ran.wait(HANG)) == (b"", 141)
    ran.stderr.close()


def test_ctrl_c_in_a_fetch_prints_one_word(server: ScriptedServer, home: Path) -> None:
    url = server.put("/a", bytes(4_000_000), stall_after=10)
    ran = subprocess.Popen([*COMMAND, "cat", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert server.stalled.wait(HANG)
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate(timeout=HANG)
    assert (out, err, ran.returncode) == (b"", b"interrupted\n", 130)


def peak_of_cat(url: str) -> tuple[int, bytes]:
    """The most memory that `cat` had, in bytes, and what it wrote."""
    reader, writer = os.pipe()
    child = subprocess.Popen([*COMMAND, "cat", url], stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_maxrss * 1024, written


@pytest.mark.parametrize("budget", [50_000_000, 100_000], ids=["kept", "no room"])
def test_a_large_object_is_never_in_memory(server: ScriptedServer, home: Path, budget: int) -> None:
    with Cache(home, budget=budget, min_free=0):
        pass
    body = os.urandom(1 << 20) * 32
    least, _ = peak_of_cat(server.put("/small", b"x"))
    most, written = peak_of_cat(server.put("/large", body))
    assert written == body
    assert most - least < len(body) // 2


def test_a_full_disk_behind_the_output_is_told(cache: Cache, server: ScriptedServer) -> None:
    with open("/dev/full", "wb") as full:
        ran = cat(server.put("/a", bytes(3_000_000)), stdout=full.fileno())
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[0] == b"error: the output cannot be written: No space left on device"
