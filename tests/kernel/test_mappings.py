"""Mappings: what they show, what keeps them, and what they do not keep."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._kernel import mappings
from forebay._kernel.locks import LockFile
from tests.conftest import descriptors, mapped
from tests.processes import Line, in_child, talk_to
from tests.strikes import take_ctrl_c

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "file"
    place.write_bytes(CONTENT)
    return place


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


def test_a_view_shows_the_file_and_cannot_change_it(fd: int) -> None:
    view = mappings.map_file(fd, len(CONTENT))
    assert view == CONTENT
    assert (view.format, view.itemsize, view.nbytes, view.readonly) == ("B", 1, len(CONTENT), True)
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_part_of_the_file_is_shown(fd: int) -> None:
    assert mappings.map_file(fd, 100, offset=4096) == CONTENT[4096:4196]


def test_stores_reach_the_file_and_other_processes(path: Path, fd: int) -> None:
    view = mappings.map_file(fd, len(CONTENT), writable=True)

    def work(line: Line) -> None:
        line.hear()
        line.say(view[5])
        view[6] = 77
        line.say()

    with talk_to(work) as child:
        view[5] = 99
        child.say()
        assert child.hear() == 99
        child.hear()
        assert view[6] == 77
    assert path.read_bytes()[5:7] == bytes([99, 77])


def test_private_stores_stay_here(path: Path, fd: int) -> None:
    view = mappings.map_file(fd, len(CONTENT), writable=True, private=True)
    view[5] = 99
    assert path.read_bytes() == CONTENT


def test_nothing_is_an_empty_view(fd: int) -> None:
    view = mappings.map_file(fd, 0)
    assert (view.nbytes, bytes(view), view.readonly) == (0, b"", True)
    known = weakref.ref(view.obj)
    del view
    assert known() is None


def test_words_are_stored_whole(fd: int) -> None:
    words = mappings.words(mappings.map_file(fd, 4096, writable=True))
    words[3] = (1 << 64) - 2
    assert os.pread(fd, 8, 24) == b"\xfe" + b"\xff" * 7
    assert len(words) == 512


def test_no_descriptor_is_kept(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    view = mappings.map_file(number, len(CONTENT))
    os.close(number)
    assert descriptors(path.parent) == set()
    path.unlink()
    assert view == CONTENT


def test_more_mappings_than_descriptors(path: Path, fd: int) -> None:
    before, types = descriptors(path.parent), mappings._array_type.cache_info().currsize
    views = [mappings.map_file(fd, length) for length in range(1, 3001)]
    assert descriptors(path.parent) == before
    assert mappings._array_type.cache_info().currsize - types <= 13
    assert [len(view) for view in views] == list(range(1, 3001))


PARTS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda view: view[100:200],
    "cast": lambda view: view[:800].cast("Q"),
    "memoryview": memoryview,
    "iterator": iter,
    "numpy": lambda view: pytest.importorskip("numpy").frombuffer(view, "u1")[5:],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_mapping_lives_as_long_as_anything_of_it(path: Path, fd: int, part: str) -> None:
    view = mappings.map_file(fd, len(CONTENT))
    known = weakref.ref(view.obj)
    left = PARTS[part](view)
    del view
    gc.collect()
    assert known() is not None
    assert mapped(path.parent) == {str(path)}
    del left
    gc.collect()
    assert known() is None
    assert mapped(path.parent) == set()


def test_the_address_is_that_of_the_first_byte(fd: int) -> None:
    view = mappings.map_file(fd, len(CONTENT))
    assert ctypes.string_at(mappings.address(view[100:]), 300) == CONTENT[:300]


def test_a_forked_child_has_its_own_hold(path: Path, fd: int) -> None:
    view = mappings.map_file(fd, len(CONTENT))

    def let_go() -> tuple[bytes, set[str]]:
        nonlocal view
        seen = bytes(view[:10])
        del view
        gc.collect()
        return seen, mapped(path.parent)

    assert in_child(let_go) == (CONTENT[:10], set())
    assert view == CONTENT


def test_what_cannot_be_mapped_is_an_error(path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mappings.map_file(999_999, 10)
    reader = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            mappings.map_file(reader, 10, writable=True)
        with pytest.raises(OSError, match="Invalid argument"):
            mappings.map_file(reader, 10, offset=5)
    finally:
        os.close(reader)


def test_a_mapping_does_not_keep_locks_alive(path: Path) -> None:
    """It is made through a descriptor of its own: what is mapped through a locked one keeps the lock in a forked child."""
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    number = os.open(path, os.O_RDONLY)
    view = mappings.map_file(number, 10)
    os.close(number)
    file.close()
    assert LockFile(path).try_lock(7, exclusive=True)
    assert len(view) == 10


def test_the_interpreter_ends_quietly_with_mappings(path: Path) -> None:
    script = (
        "import os, sys; from forebay._kernel import mappings\n"
        "fd = os.open(sys.argv[1], os.O_RDWR); view = mappings.map_file(fd, 100); sys.modules['kept'] = view\n"
        "class Cycle: pass\n"
        "cycle = Cycle(); cycle.me = cycle; cycle.view = mappings.map_file(fd, 200)[3:]\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_number_of_mappings_has_a_limit() -> None:
    assert mappings.max_maps() == int(Path("/proc/sys/vm/max_map_count").read_text())


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), None], ids=["pipe", "link", "nothing"])
def test_another_thing_in_the_place_of_a_file_is_not_mapped(path: Path, fd: int, put: Callable[[Path], object] | None) -> None:
    """And is waited for by nobody: a pipe is opened when somebody writes to it."""
    view = mappings.map_file(fd, len(CONTENT))
    mappings.note_file(view, str(path), os.fstat(fd))
    own = mappings.private(view, view.obj)
    assert (own == CONTENT, type(own.obj) is bytearray) == (True, False)
    path.unlink()
    if put is not None:
        put(path)
    own = mappings.private(view, view.obj)
    assert (own == CONTENT, type(own.obj) is bytearray) == (True, True)


@pytest.mark.parametrize("size", [len(CONTENT), 8 << 20])
def test_a_signal_while_it_is_unmapped_comes_afterwards(fd: int, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    os.truncate(fd, size)
    struck = ctypes.CDLL(None)["raise"]  # by C code, as a signal comes in `munmap`: Python's handler runs at the next instruction
    struck.argtypes = [ctypes.c_int]
    monkeypatch.setattr(mappings, "_unmap", functools.partial(struck, signal.SIGINT))
    view = mappings.map_file(fd, size)
    address = mappings.address(view)
    take_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        del view
        (lambda: None)()  # Python 3.14 looks for signals where one of its own functions begins, not in each built-in one
    monkeypatch.undo()
    mappings._unmap(address, size)


GARBAGE = """
import functools, gc, os, sys
from forebay._kernel import mappings

fd, size, kind = os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2]), sys.argv[3]


class Reader:
    def __del__(self):
        read.append(bytes(self.view[:3]))


def reading(view):
    try:
        yield
    finally:
        read.append(bytes(view[:3]))


def in_window(fd, size):
    window = mappings.Window(2 * size)
    window.map_at(fd, size, 0)
    return window.view


read = []
maps = {
    "read-only": mappings.map_file,
    "shared": functools.partial(mappings.map_file, writable=True),
    "private": functools.partial(mappings.map_file, writable=True, private=True),
    "window": in_window,
}[kind]
gc.disable()
for maps_first in (True, False):  # the collector finalizes the oldest first, or last
    view = maps(fd, size) if maps_first else None
    reader = Reader()
    reader.view = view or maps(fd, size)
    reader.generator, reader.me = reading(reader.view), reader
    next(reader.generator)
    del view, reader
    gc.collect()
print(read == [b"abc"] * 4, sys.argv[1] in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("kind", ["read-only", "shared", "private", "window"])
@pytest.mark.parametrize("size", [4096, 8 << 20])
def test_a_finalizer_may_read_what_is_collected_with_it(tmp_path: Path, size: int, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" + bytes(size - 3))
    words = [sys.executable, "-c", GARBAGE, str(path), str(size), kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")
