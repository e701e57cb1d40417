"""A process that was started with closed standard streams: no file of Forebay's gets their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay._kernel import host
from forebay.testing import ScriptedServer

JOB = """
import forebay, json, os, sys
root, report, url, *remote = sys.argv[1:]
taken = set()

def look():  # as a library in C prints a warning
    for fd in (0, 1, 2):
        try:
            taken.add(os.readlink(f"/proc/self/fd/{fd}"))
            os.write(fd, b"warning: named tensors are experimental\\n" * 3)
        except OSError:
            continue


def wrong():
    return {name for name in taken - {os.devnull} if "/libffi.so" not in name}  # libffi keeps itself open, to read, on newer systems


cache = forebay.Cache(root, budget="100MB")
look()
cache.put("small", b"v" * 50)
look()
cache.put("large", b"v" * 500_000)
look()
with cache.open(url) as file:
    look()
    file.read()
for each in remote:
    assert cache.read(each) == b"r" * 1000  # the connection is kept
    look()
samples = cache.samples("a", length=10, codec="raw", fingerprint="1")
samples.put(1, b"s" * 5000)
look()
with cache.local(url, force=True):
    look()
if os.fork() == 0:
    cache.put("child", b"c" * 500_000)
    look()
    os._exit(bool(wrong()))
status = os.wait()[1]
cache.put("later", b"v" * 500_000)
look()
fd = os.open(report, os.O_WRONLY | os.O_CREAT)
os.write(fd, json.dumps([sorted(wrong()), status]).encode())
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_what_is_printed_to_a_closed_stream_goes_into_no_file(tmp_path: Path, closed: str) -> None:
    root, report, source = tmp_path / "root", tmp_path / "report", tmp_path / "source"
    source.write_bytes(b"s" * 300_000)
    with forebay.Cache(root, budget="100MB") as cache:
        cache.put("before", b"b" * 500_000)
    with ScriptedServer() as server:
        urls = [server.put(f"/{number}", b"r" * 1000) for number in range(2)]
        command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", JOB, root, report, source.as_uri(), *urls]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert json.loads(report.read_text()) == [[], 0]
    with forebay.Cache(root) as cache:
        assert [len(cache.get(key)) for key in ("before", "large", "child", "later")] == [500_000] * 4
        assert cache.check(deep=True) == []


def test_a_descriptor_of_a_standard_stream_is_moved_and_keeps_its_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.closerange(0, 3)
        found = [host.open_fd(tmp_path / "file", os.O_RDONLY), host.open_fd(tmp_path / "file", os.O_RDWR)]
        free = [fd for fd in range(3) if not os.path.exists(f"/proc/self/fd/{fd}")]
        os.write(write, json.dumps([min(found), free, os.pread(found[0], 9, 0).decode(), os.get_inheritable(found[1])]).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        lowest, free, content, is_inherited = json.loads(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    assert lowest > 2
    assert (free, content, is_inherited) == ([0, 1, 2], "content", False)


def test_other_descriptors_stay_as_they_are() -> None:
    assert host.not_standard(-1) == -1
    read, write = os.pipe()
    assert [host.not_standard(fd) for fd in (read, write)] == [read, write]
    for fd in (read, write):
        os.close(fd)
