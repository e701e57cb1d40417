"""What Streaming calls its things on a node, and which of them are in use."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Plain
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from forebay.adapters.streaming import names as names
from forebay.adapters.streaming.shared import SharedMemory
from tests.adapters.conftest import load_streaming

HOLD = """
import sys, mmap, os
fd = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "mapped":
    memory = mmap.mmap(fd, 8)
    os.closerange(3, 100)  # the mapping alone is left
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def prefix() -> Iterator[int]:
    """A number that no job of this node has."""
    prefix = random.randrange(500_000, 999_999)
    yield prefix
    for path in names.paths_of(prefix):
        Path(path).unlink(missing_ok=True)


def all_but(prefix: int) -> list[int]:
    return [number for number in names.prefixes() if number != prefix]


def test_the_names_are_those_of_streaming() -> None:
    load_streaming()
    from streaming.base import constant
    from streaming.base.shared import prefix

    assert list(names.MEMORY) == constant.SHM_TO_CLEAN
    assert list(names.LOCK_FILES) == [constant.BARRIER_FILELOCK, constant.CACHE_FILELOCK]
    assert (names.name_of(7, "a"), names.name_of(12345678, "a")) == (prefix._get_path(7, "a"), prefix._get_path(12345678, "a"))
    for directories in (["/a"], ["/a", "/ü/b"]):
        assert names.pack(directories, 7) == prefix._pack_locals(directories, 7)
        assert names.unpack(names.pack(directories, 7)) == directories == prefix._unpack_locals(names.pack(directories, 7))[0]


@pytest.mark.parametrize("data", [b"", b"\0\0", bytes(100), b"\xff" * 40, names.pack(["/a"], 3)[:6]])
def test_what_is_no_such_piece_tells_no_directories(data: bytes) -> None:
    assert names.unpack(data) == []


@pytest.mark.parametrize("what", [*names.MEMORY, *names.LOCK_FILES])
def test_a_number_is_free_when_nothing_has_its_name(prefix: int, what: str) -> None:
    assert names.is_free(prefix)
    path = Path(tempfile.gettempdir() if what in names.LOCK_FILES else names.SHM, names.name_of(prefix, what))
    path.touch()
    assert not names.is_free(prefix)
    assert prefix in names.prefixes()


def test_directories_of_others(prefix: int) -> None:
    data = names.pack(["/data/a", "/data/b"], prefix)
    memory = SharedMemory(names.name_of(prefix, "locals"), True, len(data))
    memory.buf[:] = data
    assert dict(names.directories_of_others([]))[prefix] == ["/data/a", "/data/b"]
    assert prefix not in dict(names.directories_of_others([prefix]))
    memory.buf[:4] = bytes(4)
    assert dict(names.directories_of_others([]))[prefix] == []
    memory.cleanup()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_another_process_has_is_used(prefix: int, how: str) -> None:
    path = names.paths_of(prefix)[0]
    Path(path).write_bytes(bytes(8))
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    assert names.is_used(path)
    assert names.is_used(path, here=False)
    assert names.remove_unused(all_but(prefix)) == []
    assert Path(path).exists()
    holder.kill()
    holder.communicate()
    assert not names.is_used(path)
    assert names.remove_unused(all_but(prefix)) == [prefix]
    assert names.is_free(prefix)


def test_what_only_this_process_has_is_not_used_by_others(prefix: int) -> None:
    path = names.paths_of(prefix)[0]
    plain = Plain(os.path.basename(path), True, 8)
    assert names.is_used(path)
    assert not names.is_used(path, here=False)
    gate = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=gate.wait)
    child.start()
    assert names.is_used(path, here=False)  # its child has the mapping too
    gate.set()
    child.join()
    assert names.remove_unused(all_but(prefix)) == [prefix]
    plain.close()
    multiprocessing.resource_tracker.unregister("/" + os.path.basename(path), "shared_memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_what_is_another_users_stays(prefix: int) -> None:
    path = Path(names.paths_of(prefix)[1])
    path.touch()
    os.chown(path, 65534, 65534)
    assert names.remove_unused(all_but(prefix)) == []
    assert path.exists()


def test_memory_that_is_used_keeps_all_of_its_number(prefix: int) -> None:
    paths = [Path(path) for path in names.paths_of(prefix)]
    for path in paths:
        path.write_bytes(bytes(8))
    with paths[3].open("r+b"):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, paths[3], "open"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()
    assert names.remove_unused(all_but(prefix)) == []
    assert all(path.exists() for path in paths)
    holder.kill()
    holder.communicate()
    assert names.remove_unused(all_but(prefix)) == [prefix]
    assert not any(path.exists() for path in paths)
