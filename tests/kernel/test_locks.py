"""Locks between real processes, threads, and across every kind of fork."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._kernel import host, locks
from forebay._kernel.locks import LockFile
from tests.processes import Line, end, fork_in_c, in_child, orphan, talk_to

FAR = (1 << 62) + 12345


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "locks"
    place.touch()
    return place


def registered(path: Path, *, keep: bool) -> LockFile:
    """A lock file that is told of forks."""
    file = LockFile(path, keep=keep)
    host.at_fork(file)
    return file


def is_free(path: Path, offset: int) -> bool:
    """Whether an exclusive lock can be had now, by a description of our own."""
    return LockFile(path).try_lock(offset, exclusive=True)


def holding(path: Path, offset: int, *, exclusive: bool) -> Callable[[Line], None]:
    """A child's work: have a lock until told to let go of it, then until told to end."""

    def work(line: Line) -> None:
        file = LockFile(path)
        line.say(file.try_lock(offset, exclusive=exclusive))
        line.hear()
        file.unlock(offset)
        line.say("unlocked")
        line.hear()

    return work


# -- between processes -------------------------------------------------------------------------------------------------


def test_an_exclusive_lock_keeps_others_out_until_it_is_let_go(path: Path) -> None:
    with talk_to(holding(path, 7, exclusive=True)) as child:
        assert child.hear() is True
        file = LockFile(path)
        assert not file.try_lock(7, exclusive=True)
        assert not file.try_lock(7, exclusive=False)
        child.say()
        child.hear()
        assert file.try_lock(7, exclusive=True)


def test_shared_locks_stand_side_by_side_and_keep_an_exclusive_one_out(path: Path) -> None:
    with talk_to(holding(path, 7, exclusive=False)) as one, talk_to(holding(path, 7, exclusive=False)) as two:
        assert (one.hear(), two.hear()) == (True, True)
        one.say()
        one.hear()
        assert not is_free(path, 7)
        two.say()
        two.hear()
        assert is_free(path, 7)


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_killed_holder_holds_nothing(path: Path, exclusive: bool) -> None:
    with talk_to(holding(path, FAR, exclusive=exclusive)) as child:
        assert child.hear() is True
        assert not is_free(path, FAR)
        child.kill()
        assert is_free(path, FAR)


def test_a_stopped_holder_keeps_its_lock(path: Path) -> None:
    with talk_to(holding(path, 7, exclusive=True)) as child:
        child.hear()
        os.kill(child.pid, signal.SIGSTOP)
        assert not is_free(path, 7)


def test_each_byte_is_a_lock_of_its_own(path: Path) -> None:
    with talk_to(holding(path, 7, exclusive=True)) as child:
        child.hear()
        assert [offset for offset in (0, 6, 7, 8, 7 + (1 << 32), FAR) if not is_free(path, offset)] == [7]


# -- within a process --------------------------------------------------------------------------------------------------


def test_two_objects_exclude_each_other(path: Path) -> None:
    one, two = LockFile(path), LockFile(path)
    assert one.try_lock(7, exclusive=False)
    assert two.try_lock(7, exclusive=False)
    two.unlock(7)
    assert not two.try_lock(7, exclusive=True)
    one.unlock(7)
    assert two.try_lock(7, exclusive=True)


def test_one_object_counts_its_holders(path: Path) -> None:
    file = LockFile(path)
    assert file.try_lock(7, exclusive=False)
    assert file.try_lock(7, exclusive=False)
    assert not file.try_lock(7, exclusive=True)  # the kernel would turn the shared lock into an exclusive one
    file.unlock(7)
    assert file.held(7)
    assert not is_free(path, 7)
    file.unlock(7)
    assert not file.held(7)
    assert is_free(path, 7)


def test_an_exclusive_lock_is_held_by_one_only(path: Path) -> None:
    file = LockFile(path)
    assert file.try_lock(7, exclusive=True)
    assert not file.try_lock(7, exclusive=True)
    assert not file.try_lock(7, exclusive=False)
    file.unlock(7)
    assert not file.held(7)


def test_of_many_threads_one_gets_the_lock(path: Path) -> None:
    file, start, got = LockFile(path), threading.Barrier(8), []

    def work() -> None:
        start.wait()
        if file.try_lock(7, exclusive=True):
            got.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_an_unlock_of_what_is_not_held_does_nothing(path: Path) -> None:
    file, other = LockFile(path), LockFile(path)
    other.try_lock(7, exclusive=True)
    file.unlock(7)
    file.unlock_soon(7)
    assert not is_free(path, 7)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_nothing_is_opened_before_the_first_lock(path: Path) -> None:
    missing = LockFile(path.parent / "missing")
    assert missing.is_same()
    with pytest.raises(FileNotFoundError):
        missing.try_lock(1, exclusive=True)
    assert not missing.held(1)


def test_a_file_that_can_only_be_read_gives_shared_locks(path: Path) -> None:
    path.chmod(0o400)
    reader = LockFile(path, writable=False)
    assert not reader.try_lock(7, exclusive=True)
    assert reader.try_lock(7, exclusive=False)
    assert not is_free(path, 7)


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    link = path.parent / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links") as caught:
        LockFile(link).try_lock(7, exclusive=True)
    assert caught.value.errno == errno.ELOOP


def test_a_full_table_of_descriptors_is_told_and_leaves_nothing(path: Path) -> None:
    def work() -> tuple[int | None, bool, bool]:
        file = LockFile(path)
        with no_descriptors_left():
            try:
                file.try_lock(7, exclusive=True)
                told = None
            except OSError as error:
                told = error.errno
        return told, file.held(7), file.try_lock(7, exclusive=True)

    assert in_child(work) == (errno.EMFILE, False, True)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_deleted_or_replaced_lock_file_is_noticed(path: Path) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    assert file.is_same()
    path.rename(path.with_name("away"))
    assert not file.is_same()
    path.touch()
    assert not file.is_same()
    path.with_name("away").rename(path)
    assert file.is_same()


def test_closing_lets_go_of_everything_and_is_not_the_end(path: Path) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    file.try_lock(8, exclusive=False)
    file.close()
    file.close()
    assert is_free(path, 7)
    assert is_free(path, 8)
    file.unlock(7)
    assert file.try_lock(7, exclusive=True)
    assert not is_free(path, 7)


def test_a_retired_file_is_closed_after_its_last_lock(path: Path) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=False)
    file.retire()
    assert open_on(path) == 1
    assert not is_free(path, 7)
    file.unlock_soon(7)
    assert open_on(path) == 0
    assert file.try_lock(8, exclusive=True)
    file.unlock(8)
    assert open_on(path) == 0


def test_a_retired_file_is_closed_where_a_lock_is_refused(path: Path) -> None:
    other, file = LockFile(path), LockFile(path)
    other.try_lock(7, exclusive=True)
    file.retire()
    assert not file.try_lock(7, exclusive=True)
    assert open_on(path) == 1


def test_the_descriptor_goes_with_the_object(path: Path) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    del file
    assert open_on(path) == 0
    assert is_free(path, 7)


def open_on(path: Path) -> int:
    """How many descriptors of a file this process has."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{number}") == str(path)
    return found


# -- descriptors that the job closed -----------------------------------------------------------------------------------


def closing_ours(path: Path) -> list[int]:
    """What a job does that makes itself a daemon: it closes all descriptors, ours too. Gives their numbers."""
    closed = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{number}") == str(path):
                os.close(int(number))
                closed.append(int(number))
    return closed


def test_locks_are_taken_anew_after_the_job_closed_our_descriptor(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=False)
    closing_ours(path)
    assert is_free(path, 7)
    assert not file.is_same()
    assert file.try_lock(8, exclusive=True)
    assert file.is_same()
    assert not is_free(path, 7)
    assert not is_free(path, 8)
    assert "closed by this process's own code" in caplog.text


def test_what_another_took_meanwhile_is_not_held_any_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOOK_AGAIN", 0.0)
    file = LockFile(path)
    file.try_lock(7, exclusive=False)
    with talk_to(holding(path, 7, exclusive=True)) as child:
        assert child.hear() is False
    closing_ours(path)
    with talk_to(holding(path, 7, exclusive=True)) as child:  # its pipe has the number now
        assert child.hear() is True
        assert file.try_lock(8, exclusive=True)
        assert not file.held(7)
        file.unlock(7)
        assert not is_free(path, 7)


def test_an_unlock_after_the_job_closed_our_descriptor_is_no_error(path: Path) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    closing_ours(path)
    file.unlock(7)
    assert not file.held(7)


@pytest.mark.parametrize("end", ["close", "retire", "forget", "fork"])
def test_a_descriptor_that_the_job_opened_in_place_of_ours_is_left_alone(path: Path, end: str) -> None:
    def work() -> str:
        kept = registered(path, keep=False)
        kept.try_lock(7, exclusive=True)
        (number,) = closing_ours(path)
        os.dup2(os.open(path.parent, os.O_RDONLY), number)
        if end == "fork":
            return str(in_child(lambda: os.readlink(f"/proc/self/fd/{number}")))
        if end == "forget":
            del kept
        else:
            kept.unlock(7)
            getattr(kept, end)()
        return os.readlink(f"/proc/self/fd/{number}")

    assert in_child(work) == str(path.parent)


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_forked_child_has_none_of_the_locks_that_are_not_kept(path: Path) -> None:
    kept = registered(path, keep=False)
    kept.try_lock(7, exclusive=True)

    def work() -> tuple[bool, bool, int]:
        held = kept.held(7)
        kept.unlock(7)  # as a `with` block of the parent does that the child leaves
        return held, kept.try_lock(7, exclusive=True), open_on(path)

    assert in_child(work) == (False, False, 1)
    assert kept.held(7)
    assert not is_free(path, 7)


def test_a_dead_parents_lock_does_not_live_on_in_its_child(path: Path) -> None:
    kept = registered(path, keep=False)

    def parent() -> None:
        kept.try_lock(7, exclusive=True)

    def child(line: Line) -> None:
        line.say("up")
        line.hear()

    with orphan(child, parent=parent) as (first, line):
        line.hear()
        assert not is_free(path, 7)
        first.kill()
        assert is_free(path, 7)


def leasing(path: Path) -> Callable[[Line], None]:
    """A child's work: say what it holds, let go when told, end when told."""
    kept = registered(path, keep=True)
    kept.try_lock(7, exclusive=False)

    def work(line: Line) -> None:
        line.say(kept.held(7))
        line.hear()
        kept.unlock(7)
        line.say(kept.held(7))
        line.hear()

    work.kept = kept  # type: ignore[attr-defined]
    return work


def test_a_lease_taken_before_the_fork_pins_for_both(path: Path) -> None:
    work = leasing(path)
    file = work.kept  # type: ignore[attr-defined]
    with talk_to(work) as child:
        assert child.hear() is True
        file.unlock(7)
        assert not is_free(path, 7)  # the child has it
        child.say()
        assert child.hear() is False
        assert is_free(path, 7)


def test_the_childs_unlock_leaves_the_parents_lease(path: Path) -> None:
    work = leasing(path)
    with talk_to(work) as child:
        child.hear()
        child.say()
        child.hear()
        assert not is_free(path, 7)
        child.kill()
        assert not is_free(path, 7)


def test_a_lease_outlives_the_parent_in_the_child_and_ends_with_it(path: Path) -> None:
    with talk_to(lambda line: _lease_and_fork(path, line)) as parent:
        child = parent.hear()
        parent.kill()
        assert not is_free(path, 7)
        end(child)
        assert is_free(path, 7)


def _lease_and_fork(path: Path, line: Line) -> None:
    kept = registered(path, keep=True)
    kept.try_lock(7, exclusive=False)
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(done, b".")
        signal.pause()
    os.read(ready, 1)
    line.say(pid)
    signal.pause()


def test_several_holders_and_what_was_put_off_are_the_childs_too(path: Path) -> None:
    kept = registered(path, keep=True)
    for _ in range(3):
        kept.try_lock(7, exclusive=False)

    def work() -> list[bool]:
        held = []
        for _ in range(3):
            kept.unlock(7)
            held.append(kept.held(7))
        return held

    assert in_child(work) == [True, True, False]
    assert kept.held(7)


def test_an_exclusive_lock_is_not_the_childs_even_among_leases(path: Path) -> None:
    kept = registered(path, keep=True)
    kept.try_lock(7, exclusive=False)
    kept.try_lock(8, exclusive=True)
    assert in_child(lambda: (kept.held(7), kept.held(8))) == (True, False)
    assert kept.held(8)
    assert not is_free(path, 8)


def test_a_child_has_its_leases_though_no_descriptor_was_free_at_the_fork(path: Path) -> None:
    def work() -> tuple[bool, bool]:
        kept = registered(path, keep=True)
        kept.try_lock(7, exclusive=False)
        highest = max(int(number) for number in os.listdir("/proc/self/fd"))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_on_all(highest), hard))
        pid = os.fork()
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if pid == 0:
            os._exit(0 if kept.held(7) and os.getpid() in locks.holders(path, 7) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, kept.held(7)

    assert in_child(work) == (True, True)


def open_on_all(highest: int) -> int:
    """Fill the gaps below the highest descriptor; gives the limit that leaves no number free."""
    while True:
        number = os.dup(2)
        if number > highest:
            os.close(number)
            return highest + 1


def test_a_fork_that_failed_leaves_all_as_it_was(path: Path) -> None:
    file = LockFile(path, keep=True)
    file.try_lock(7, exclusive=False)
    file.before_fork()
    assert open_on(path) == 2
    file.after_fork_parent()
    assert open_on(path) == 1
    file.unlock(7)
    assert is_free(path, 7)


def test_forks_while_threads_lock_and_unlock(path: Path) -> None:
    kept, stop = registered(path, keep=True), threading.Event()
    kept.try_lock(7, exclusive=False)

    def busy(offset: int) -> None:
        while not stop.is_set():
            if kept.try_lock(offset, exclusive=False):
                kept.unlock(offset)

    threads = [threading.Thread(target=busy, args=(100 + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = [in_child(lambda: (kept.held(7), kept.try_lock(50, exclusive=True), open_on(path))) for _ in range(40)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found == [(True, True, 1)] * 40
    assert open_on(path) == 1


# -- forks by C code, which run no hook --------------------------------------------------------------------------------


def test_a_process_forked_by_c_has_no_locks_and_drops_none(path: Path) -> None:
    kept = registered(path, keep=True)
    kept.try_lock(7, exclusive=False)

    def work() -> tuple[bool, bool, bool]:
        held = kept.held(7)
        kept.unlock(7)
        kept.unlock_soon(7)
        exclusive = kept.try_lock(7, exclusive=True)
        own = kept.try_lock(8, exclusive=True)
        kept.unlock_soon(8)
        return held, exclusive, own

    assert in_child(work, by=fork_in_c) == (False, False, True)
    assert not is_free(path, 7)
    assert is_free(path, 8)


@pytest.mark.parametrize("touch", ["try_lock", "close", "retire"])
def test_a_process_forked_by_c_lets_go_of_a_dead_parents_locks_once_it_is_used(path: Path, touch: str) -> None:
    kept = registered(path, keep=False)

    def work(line: Line) -> None:
        kept.try_lock(9, exclusive=True) if touch == "try_lock" else getattr(kept, touch)()
        line.say("parted")
        line.hear()

    with orphan(work, parent=lambda: kept.try_lock(7, exclusive=True), by=fork_in_c) as (first, line):
        line.hear()
        assert not is_free(path, 7)
        first.kill()
        assert is_free(path, 7)


# -- finalizers --------------------------------------------------------------------------------------------------------


class Cycle:
    """Something that only the garbage collector ends, whenever it likes."""

    def __init__(self, file: LockFile, offset: int) -> None:
        self.me = self
        weakref.finalize(self, file.unlock_soon, offset).atexit = False


@pytest.fixture
def eager_gc() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_gc")
def test_s30_finalizers_in_many_threads_leave_no_lock_and_block_nobody(path: Path) -> None:
    file = LockFile(path)

    def work(base: int) -> None:
        for i in range(400):
            offset = base + i % 7
            if file.try_lock(offset, exclusive=False):
                Cycle(file, offset)
            if file.try_lock(offset, exclusive=False):
                file.unlock(offset)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [offset for n in range(6) for offset in range(100 * n, 100 * n + 7) if not is_free(path, offset)] == []


def test_s30_a_ring_of_a_lock_file_and_its_holders_ends_in_any_order(path: Path) -> None:
    """The collector may finalize the file before who holds a lock in it."""

    class Holder:
        def __init__(self, file: LockFile) -> None:
            self.file = file

        def __del__(self) -> None:
            self.file.unlock_soon(7)

    for first in (True, False):
        file = LockFile(path)
        holders = [Holder(file) for _ in range(2)]
        for _ in range(2):
            assert file.try_lock(7, exclusive=False)
        if first:
            file.__del__()
        file.ring = holders  # type: ignore[attr-defined]
        del file, holders
        gc.collect()
        assert is_free(path, 7)


class Impatient:
    """A mutex for one thread, in which any wait is a deadlock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and self._lock.locked():
            raise AssertionError("a wait for the mutex that this thread holds")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_s30_a_finalizer_inside_the_lock_itself_waits_for_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LockFile(path)
    file._mutex = Impatient()  # type: ignore[assignment]
    file.try_lock(7, exclusive=False)
    ask = locks._set

    def collected_meanwhile(fd: int, kind: int, offset: int) -> bool:
        if offset == 8:
            file.unlock_soon(7)
        return ask(fd, kind, offset)

    with monkeypatch.context() as patch:
        patch.setattr(locks, "_set", collected_meanwhile)
        assert file.try_lock(8, exclusive=True)
    assert not file.held(7)
    assert is_free(path, 7)


def test_a_finalizer_between_fork_and_hook_counts_in_the_child(path: Path) -> None:
    class Between:
        """Registered earlier than the lock file: its hook runs first in the child."""

        file: LockFile

        def before_fork(self) -> None: ...

        def after_fork_parent(self) -> None: ...

        def after_fork_child(self) -> None:
            self.file.unlock_soon(7)

    between = Between()
    host.at_fork(between)
    kept = registered(path, keep=True)
    between.file = kept
    kept.try_lock(7, exclusive=False)
    assert in_child(lambda: kept.held(7)) is False
    assert kept.held(7)


def test_the_interpreter_ends_quietly_with_locks_held(path: Path) -> None:
    script = (
        "import sys, weakref; from forebay._kernel.locks import LockFile\n"
        "file = LockFile(sys.argv[1]); file.try_lock(7, exclusive=False)\n"
        "class Held: pass\n"
        "held = Held(); weakref.finalize(held, file.unlock_soon, 7); held.me = held\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_free(path, 7)


# -- who holds what ----------------------------------------------------------------------------------------------------


def test_s08_the_holders_of_a_byte_are_known(path: Path) -> None:
    assert locks.holders(path, FAR) == ()
    with talk_to(holding(path, FAR, exclusive=False)) as one, talk_to(holding(path, FAR, exclusive=False)) as two:
        one.hear(), two.hear()
        assert set(locks.holders(path, FAR)) == {one.pid, two.pid}
        assert locks.holders(path, FAR + 1) == ()
        assert str(one.pid) in locks.describe_holders(path, FAR)
        one.say()
        one.hear()
        assert locks.holders(path, FAR) == (two.pid,)
    assert locks.describe_holders(path, FAR) == "an unknown process"


def test_a_descriptor_that_closes_meanwhile_hides_no_holder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LockFile(path)
    file.try_lock(7, exclusive=True)
    real = locks.numbers
    monkeypatch.setattr(locks, "numbers", lambda directory: [999_999, *real(directory)])
    assert locks.holders(path, 7) == (os.getpid(),)


def test_the_holders_of_a_file_that_is_gone_are_nobody(path: Path) -> None:
    assert locks.holders(path.parent / "missing", 1) == ()


def test_a_process_is_described_without_its_arguments(path: Path) -> None:
    script = path.parent / "train.py"
    script.write_text("import sys; print('up', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, script, "--token=secret"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = locks.describe_process(process.pid)
        process.communicate()
    assert str(process.pid) in said
    assert socket.gethostname() in said
    assert "train.py" in said
    assert "secret" not in said
    assert "unknown" in locks.describe_process(process.pid)


def test_claims_that_are_closed_are_free_also_where_a_forked_child_has_the_file_open(path: Path) -> None:
    mine, others = locks.Claims(path), locks.Claims(path)
    assert mine.try_claim(5)
    with talk_to(lambda line: line.hear()) as child:
        assert not others.try_claim(5)
        mine.close()
        assert others.try_claim(5)
        child.say()
        child.result()
    others.close()


def test_claims_that_a_forked_child_closes_stay_its_parents(path: Path) -> None:
    mine, others = locks.Claims(path), locks.Claims(path)
    assert mine.try_claim(5)
    in_child(mine.close)
    assert not others.try_claim(5)
    assert mine.is_open()
    os.close(mine._fd)
    assert not mine.is_open()
    assert others.try_claim(5)
    others.close()


def test_a_file_is_read_though_the_job_closed_its_descriptor(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b"the first bytes")
    file = LockFile(path)
    assert file.read(9) == b"the first"
    closing_ours(path)
    assert file.read(9) == b"the first"
    assert "closed by this process's own code" in caplog.text
    file.close()
