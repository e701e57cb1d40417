"""The calls that change files, the facts, and what is told of forks."""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay._kernel import host, locks, mappings
from tests.processes import Line, fork_in_c, in_child, talk_to

MiB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = host.create(tmp_path / "file", 0o600)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    yield
    host.on_step(None)


# -- steps -------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


CHANGES: dict[str, Callable[[Path], object]] = {
    "create": lambda d: os.close(host.create(d / "new", 0o600)),
    "pwrite": lambda d: with_fd(d / "a", lambda fd: host.pwrite(fd, b"other", 0)),
    "allocate": lambda d: with_fd(d / "a", lambda fd: host.allocate(fd, 0, MiB)),
    "punch": lambda d: with_fd(d / "a", lambda fd: host.punch(fd, 0, 4096)),
    "truncate": lambda d: with_fd(d / "a", lambda fd: host.truncate(fd, 1)),
    "rename": lambda d: host.rename(d / "a", d / "b"),
    "link": lambda d: host.link(d / "a", d / "b"),
    "unlink": lambda d: host.unlink(d / "a"),
    "mkdir": lambda d: host.mkdir(d / "new", 0o700),
    "rmdir": lambda d: host.rmdir(d / "empty"),
    "chmod": lambda d: host.chmod(d / "a", 0o400),
    "copy_range": lambda d: with_fd(d / "a", lambda fd: with_other(d.parent, lambda other: host.copy_range(other, fd, 0, 100))),
    "set_mtime": lambda d: with_fd(d / "a", lambda fd: host.set_mtime(fd, 5)),
}


def with_fd(path: Path, work: Callable[[int], object]) -> None:
    fd = host.open_write(path)
    try:
        work(fd)
    finally:
        os.close(fd)


def with_other(directory: Path, work: Callable[[int], object]) -> None:
    with tempfile.TemporaryFile(dir=directory, buffering=0) as other:
        other.write(bytes(range(100)))
        work(other.fileno())


def picture(directory: Path) -> list[tuple[object, ...]]:
    """All that can be seen of the files."""
    seen: list[tuple[object, ...]] = []
    for path in sorted(directory.iterdir()):
        found = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        seen.append((path.name, found.st_mode, found.st_size, found.st_blocks, found.st_nlink, found.st_mtime_ns, content))
    return seen


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_announced_and_can_be_stopped(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(b"some bytes of it" * 600)
    (tmp_path / "empty").mkdir()
    before, told = picture(tmp_path), []

    def hook(call: str, subject: str) -> None:
        told.append(call)
        raise Stop

    host.on_step(hook)
    with pytest.raises(Stop):
        CHANGES[name](tmp_path)
    assert told == [name]
    assert picture(tmp_path) == before
    host.on_step(None)
    CHANGES[name](tmp_path)
    assert picture(tmp_path) != before


def test_stores_into_mappings_are_steps(file: int) -> None:
    host.allocate(file, 0, 4096)
    view = mappings.map_file(file, 4096, writable=True)
    told: list[str] = []
    host.on_step(lambda call, subject: told.append(call))
    host.set_word(mappings.words(view), 3, 0x0102030405060708)
    host.set_byte(view, 100, 7)
    assert told == ["set_word", "set_byte"]
    assert os.pread(file, 8, 24) == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert os.pread(file, 1, 100) == b"\7"


def test_a_fault_can_be_put_in_place_of_a_change(file: int) -> None:
    def full(call: str, subject: str) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    host.on_step(full)
    with pytest.raises(OSError, match="quota") as caught:
        host.pwrite(file, b"x", 0)
    assert caught.value.errno == errno.EDQUOT


# -- changes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("narrow_umask")
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o444])
def test_a_new_file_has_its_mode_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    os.close(host.create(tmp_path / "new", mode))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


@pytest.mark.usefixtures("narrow_umask")
def test_a_user_s_own_file_has_what_the_umask_leaves(tmp_path: Path) -> None:
    os.close(host.create(tmp_path / "new", 0o666, masked=True))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_bytes_go_from_file_to_file_or_not_at_all(file: int, tmp_path: Path) -> None:
    host.pwrite(file, b"0123456789", 0)
    other = host.create(tmp_path / "other", 0o600)
    try:
        assert host.copy_range(file, other, 4, 100) == 6
        assert os.pread(other, 20, 0) == bytes(4) + b"456789"
        reading = os.open("/proc/self/status", os.O_RDONLY)
        try:
            assert host.copy_range(reading, other, 0, 100) == 0
        finally:
            os.close(reading)
    finally:
        os.close(other)


def test_a_name_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"its own")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("taken", "link"):
        with pytest.raises(FileExistsError):
            host.create(tmp_path / name, 0o600)
    with pytest.raises(FileExistsError):
        host.link(tmp_path / "taken", tmp_path / "link")
    assert (tmp_path / "taken").read_bytes() == b"its own"
    assert not (tmp_path / "nowhere").exists()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"")
    target.chmod(0o640)
    link.symlink_to(target)
    for call in (lambda: host.open_write(link), lambda: host.chmod(link, 0o777)):
        with pytest.raises(OSError, match=r"symbolic links|not supported"):
            call()
    host.link(link, tmp_path / "second")
    assert (tmp_path / "second").is_symlink()
    assert host.unlink(link)
    assert target.exists()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_modes_are_set_by_path_and_by_descriptor(tmp_path: Path, file: int) -> None:
    host.chmod(file, 0o640)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    host.chmod(tmp_path / "file", 0o400)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o400
    host.chmod(tmp_path, 0o2770)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2770


def test_all_is_written_in_however_many_pieces(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    host.pwrite(file, b"0123456789", 5)
    host.pwrite(file, b"", 0)
    assert os.pread(file, 100, 0) == bytes(5) + b"0123456789"


def test_words_are_written_as_bytes(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, bytes(data)[:12], offset))
    numbers = array.array("Q", range(10))
    host.pwrite(file, memoryview(numbers), 0)
    assert os.pread(file, 100, 0) == numbers.tobytes()


def unsupported(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("supported", [True, False])
def test_allocated_bytes_have_blocks_and_old_ones_stay(file: int, monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    if not supported:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    host.pwrite(file, b"old", 0)
    host.allocate(file, 0, 3 * MiB + 1)
    host.allocate(file, 100, 0)
    found = os.fstat(file)
    assert found.st_size == 3 * MiB + 1
    assert found.st_blocks * 512 >= 3 * MiB
    assert os.pread(file, 5, 0) == b"old\0\0"


def test_other_faults_of_allocate_are_told(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        host.allocate(file, 0, MiB)


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "forebay-test", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.processes
@pytest.mark.root
def test_a_full_disk_is_told_before_anything_is_stored(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2 * MiB):
        fd = host.create(tmp_path / "big", 0o600)
        try:
            with pytest.raises(OSError, match="No space"):
                host.allocate(fd, 0, 4 * MiB)
            host.truncate(fd, 0)
            host.allocate(fd, 0, MiB)
            free = host.disk(tmp_path).free
            assert free <= MiB
            host.punch(fd, 0, MiB)
            assert host.disk(tmp_path).free == free + MiB
        finally:
            os.close(fd)


def test_a_punched_range_gives_its_blocks_back_and_reads_as_zeros(file: int) -> None:
    host.pwrite(file, b"x" * (3 * MiB), 0)
    os.fsync(file)
    before = os.fstat(file).st_blocks
    host.punch(file, MiB, MiB)
    assert os.fstat(file).st_size == 3 * MiB
    assert before - os.fstat(file).st_blocks == MiB // 512
    assert os.pread(file, 3, MiB - 1) == b"x\0\0"
    with pytest.raises(OSError, match="Invalid"):
        host.punch(file, 0, -1)


def test_what_is_gone_or_there_already_is_said(tmp_path: Path) -> None:
    assert host.mkdir(tmp_path / "new", 0o700) is True
    assert host.mkdir(tmp_path / "new", 0o700) is False
    (tmp_path / "file").touch()
    assert host.unlink(tmp_path / "file") is True
    assert host.unlink(tmp_path / "file") is False
    host.rmdir(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_rename_replaces_in_one_instant(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"a")
    (tmp_path / "new").write_bytes(b"b")
    host.rename(tmp_path / "old", tmp_path / "new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("new", b"a")]


def test_a_clone_has_all_or_is_refused(tmp_path: Path, file: int) -> None:
    (tmp_path / "source").write_bytes(b"shared blocks" * 1000)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    try:
        cloned = host.clone(source, file)
    finally:
        os.close(source)
    assert os.fstat(file).st_size == (13_000 if cloned else 0)


def test_a_clone_that_fails_for_a_reason_of_its_own_is_an_error(file: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        host.clone(file, 999_999)


# -- facts -------------------------------------------------------------------------------------------------------------


def test_the_boot_has_a_name() -> None:
    assert host.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert in_child(host.boot_id) == host.boot_id()


def test_the_room_on_a_disk_is_known(tmp_path: Path) -> None:
    disk = host.disk(tmp_path)
    assert disk.block >= 512
    assert 0 < disk.free <= disk.total
    assert disk.total % disk.block == 0


@pytest.mark.parametrize(("path", "kind"), [("/proc/self", "0x9fa0"), ("/dev/shm", "tmpfs")])
def test_the_kind_of_a_file_system_is_known(path: str, kind: str) -> None:
    assert host.fs_kind(path) == kind


def test_the_kind_of_a_missing_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        host.fs_kind(tmp_path / "nowhere")


def test_what_cannot_hold_a_cache_is_told_from_what_can() -> None:
    assert [kind for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "0x1234") if not host.is_local(kind)] == []
    assert [kind for kind in ("nfs", "lustre", "cifs", "fuse", "9p", "virtiofs", "ceph", "gpfs", "beegfs") if host.is_local(kind)] == []
    assert host.NETWORK_KINDS - {"virtiofs"} <= set(host._KINDS.values())


# -- forks -------------------------------------------------------------------------------------------------------------


class Listener:
    def __init__(self, name: str, said: list[str], fails: bool = False) -> None:
        self.name, self.said, self.fails = name, said, fails
        host.at_fork(self)

    def _say(self, what: str) -> None:
        self.said.append(f"{what} {self.name}")
        if self.fails:
            raise ValueError(self.name)

    def before_fork(self) -> None:
        self._say("before")

    def after_fork_parent(self) -> None:
        self._say("parent")

    def after_fork_child(self) -> None:
        self._say("child")


def test_the_last_to_register_is_told_first_before_and_last_after() -> None:
    said: list[str] = []
    listeners = [Listener(name, said) for name in "abc"]
    before = ["before c", "before b", "before a"]
    assert in_child(lambda: said) == [*before, "child a", "child b", "child c"]
    assert said == [*before, "parent a", "parent b", "parent c"]
    assert len(listeners) == 3


def test_a_fork_listener_that_fails_keeps_no_other_from_being_called(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    listeners = [Listener("a", said), Listener("bad", said, fails=True), Listener("c", said)]
    assert in_child(lambda: said)[-3:] == ["child a", "child bad", "child c"]
    assert said[-3:] == ["parent a", "parent bad", "parent c"]
    assert caplog.text.count("before_fork of") == 1
    assert len(listeners) == 3


def test_who_is_gone_is_not_told() -> None:
    said: list[str] = []
    gc.collect()  # of what earlier tests left
    listener: Listener | None = Listener("a", said)
    known = len(host._listeners)
    listener = None
    gc.collect()
    assert listener is None
    assert len(host._listeners) == known - 1
    in_child(lambda: None)
    assert said == []


def test_who_registers_during_a_fork_is_told_of_it_in_the_child_only() -> None:
    said: list[str] = []
    late: list[Listener] = []

    class Early(Listener):
        def before_fork(self) -> None:
            if not late:
                late.append(Listener("late", said))

    early = Early("early", said)
    assert in_child(lambda: said) == ["child early", "child late"]  # its lock may be held by a thread that the child does not have
    assert said == ["parent early"]
    assert in_child(lambda: said) == ["parent early", "before late", "child early", "child late"]
    assert early.name == "early"


def test_a_lock_that_another_thread_takes_during_a_fork_is_free_in_the_child(tmp_path: Path) -> None:
    """A look-ahead of another thread registers the lock of its table, and closes it: the fork knows nothing of that lock."""
    late: list[locks.LockFile] = []

    class Early(Listener):
        def before_fork(self) -> None:
            if not late:
                late.append(locks.LockFile(tmp_path / "file"))
                host.at_fork(late[0])
                late[0]._mutex.acquire()

    early = Early("early", [])
    assert in_child(lambda: late[0]._mutex.acquire(blocking=False))
    late[0]._mutex.release()
    assert early.name == "early"


def test_a_collection_while_a_fork_looks_who_is_told() -> None:
    """It finalizes listeners that only rings of garbage refer to, and takes them from the list that is being copied."""
    said: list[str] = []
    keep = [Listener("x", said) for _ in range(3)]
    before = gc.get_threshold()
    for allocations in range(100):  # after so many of what a fork allocates
        gc.disable()
        for _ in range(50):
            ring: list[object] = [Listener("gone", said)]
            ring.append(ring)
        del ring
        gc.set_threshold(gc.get_count()[0] + allocations % 20, 1, 1)
        gc.enable()
        host._before()
        gc.set_threshold(*before)
        host._after_parent()
    assert said.count("before x") == said.count("parent x") == 100 * len(keep)


def test_many_threads_may_register_at_once() -> None:
    said: list[str] = []
    start, made = threading.Barrier(8), []
    gc.collect()  # what earlier tests left, and would go while it is counted
    known = len(host._listeners)

    def work() -> None:
        start.wait()
        made.extend([Listener("x", said) for _ in range(200)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1600
    assert len(host._listeners) == known + 1600


def test_a_fork_waits_for_a_thread_that_imports_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child would wait for ever for that thread, which it does not have."""
    text = "import forebay\nforebay.began.set()\nforebay.go_on.wait()\nanswer = sum(range(5_000_000))\n"
    (tmp_path / "slow_to_import.py").write_text(text)
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(forebay, "__path__", [*forebay.__path__, str(tmp_path)])
    monkeypatch.setattr(forebay, "began", began, raising=False)
    monkeypatch.setattr(forebay, "go_on", go_on, raising=False)

    class Listener:
        def before_fork(self) -> None:
            go_on.set()

        def after_fork_parent(self) -> None: ...

        def after_fork_child(self) -> None:
            signal.alarm(20)

    thread = threading.Thread(target=importlib.import_module, args=["forebay.slow_to_import"])
    thread.start()
    began.wait()
    listener = Listener()
    host.at_fork(listener)
    assert in_child(lambda: importlib.import_module("forebay.slow_to_import").answer) == sum(range(5_000_000))
    thread.join()


def test_an_import_that_does_not_end_holds_up_one_fork_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "endless_to_import.py").write_text("import forebay\nforebay.began.set()\nforebay.go_on.wait()\n")
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(forebay, "__path__", [*forebay.__path__, str(tmp_path)])
    monkeypatch.setattr(forebay, "began", began, raising=False)
    monkeypatch.setattr(forebay, "go_on", go_on, raising=False)
    monkeypatch.setattr(host, "_LONGEST_IMPORT", 0.05)
    thread = threading.Thread(target=importlib.import_module, args=["forebay.endless_to_import"])
    thread.start()
    began.wait()
    with caplog.at_level(logging.INFO):
        assert [in_child(lambda: 3), in_child(lambda: 4)] == [3, 4]
    go_on.set()
    thread.join()
    assert caplog.text.count("a fork did not wait any longer for the import of forebay.endless_to_import") == 1


def test_a_fork_waits_for_what_no_child_may_inherit_after_all_that_it_takes_itself() -> None:
    reached, order = threading.Event(), list[str]()

    class Listener:
        def before_fork(self) -> None:
            reached.set()

        def after_fork_child(self) -> None:
            order.append("the child")

    listener = Listener()
    host.at_fork(listener)
    seen = list[list[str]]()

    def take() -> list[str]:
        with host.uncopied:
            return order

    with host.uncopied:
        thread = threading.Thread(target=lambda: seen.append(in_child(take)))
        thread.start()
        reached.wait()
        order.append("released")
    thread.join()
    assert seen == [["released", "the child"]]
    with host.uncopied:
        assert in_child(take) == ["released", "the child"]


@pytest.mark.processes
def test_a_fork_does_not_wait_for_a_module_that_its_own_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import forebay\nfrom tests.processes import in_child\nanswer = in_child(lambda: forebay.began)\n"
    (tmp_path / "forks_at_import.py").write_text(text)
    monkeypatch.setattr(forebay, "__path__", [*forebay.__path__, str(tmp_path)])
    monkeypatch.setattr(forebay, "began", 3, raising=False)
    assert importlib.import_module("forebay.forks_at_import").answer == 3


def test_a_property_that_a_thread_computes_is_computed_by_a_child() -> None:
    began, go_on = threading.Event(), threading.Event()

    class Owner:
        waits = False

        @host.cached_property
        def answer(self) -> list[int]:
            if self.waits:
                began.set()
                go_on.wait()
            return [3]

    first, other = Owner(), Owner()
    first.waits = True
    thread = threading.Thread(target=lambda: first.answer)
    thread.start()
    began.wait()

    def work() -> list[int]:
        signal.alarm(20)
        first.waits = False
        return other.answer + first.answer

    assert in_child(work) == [3, 3]
    first.waits = False
    now = first.answer  # computed by both threads, kept once
    go_on.set()
    thread.join()
    assert first.answer is now
    assert isinstance(Owner.answer, host.cached_property)


def test_threads_may_fork_at_once() -> None:
    """Each fork's hooks come in pairs, though another thread's fork stands between them."""

    class Guard:
        def __init__(self) -> None:
            self.mutex, self.depth = threading.Lock(), 0
            host.at_fork(self)

        def before_fork(self) -> None:
            self.mutex.acquire()
            self.depth += 1

        def after_fork_parent(self) -> None:
            self.depth -= 1
            self.mutex.release()

        def after_fork_child(self) -> None:
            self.mutex, self.depth = threading.Lock(), 0

    guards = [Guard() for _ in range(3)]
    found: list[object] = []

    def work() -> None:
        for _ in range(10):
            extra = Guard()
            found.append(in_child(lambda: [guard.depth for guard in (*guards, extra)]))  # noqa: B023

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 0, 0, 0]] * 30
    assert [(guard.depth, guard.mutex.locked()) for guard in guards] == [(0, False)] * 3


def test_a_process_that_c_forked_is_known_and_so_are_its_children() -> None:
    said: list[str] = []
    listener = Listener("a", said)

    def work(line: Line) -> None:
        line.say((host.forked_unseen(), in_child(lambda: (host.forked_unseen(), said)), said))

    with talk_to(work, by=fork_in_c) as child:
        assert child.hear() == (True, (True, []), [])
    assert not host.forked_unseen()
    assert in_child(host.forked_unseen) is False
    assert listener.name == "a"
