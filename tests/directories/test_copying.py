"""Private copies of directories: whole, writable, ended where one was killed; what stands there already is the user's."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import host
from forebay._model import ObjectInfo
from forebay.directories import copying
from forebay.directories.copying import FileSink, copy_tree, fetch_tree, has_stamp, locked, stamp, target_of
from forebay.directories.manifests import File, Manifest
from tests.processes import Child, death_of, fork, fork_to_die
from tests.strikes import interrupted

BODIES = {
    "config.json": b"{}",
    "empty": b"",
    "model-00001.bin": random.Random(1).randbytes(3_000_000),
    "deep/er/weights.bin": random.Random(2).randbytes(70_001),
    "deep/notes.txt": b"some words",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", BODIES)


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    yield
    host.on_step(None)


def write(top: Path, bodies: dict[str, bytes]) -> Path:
    for name, body in bodies.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(body)
    return top


def listed(bodies: dict[str, bytes] = BODIES, version: str = "1") -> Manifest:
    return Manifest.of(File(name, len(body), f'"{version}-{name}"', 1_700_000_000.0) for name, body in bodies.items())


def found(top: Path) -> dict[str, bytes]:
    """All files below, by whatever name."""
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if not path.is_dir()}


def copy(source: Path, target: Path, bodies: dict[str, bytes] = BODIES, version: str = "1", **how: Any) -> None:
    copy_tree(source, listed(bodies, version), target, **how)


def left_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name not in (target.name, "source", "root", "other"))


class Remote:
    """Brings bytes; ``before(name)`` is called in the thread that does."""

    def __init__(self, bodies: dict[str, bytes] = BODIES, version: str = "1") -> None:
        self.bodies, self.version = bodies, version
        self.brought: list[str] = []
        self.before: Callable[[str], object] = lambda name: None

    def __call__(self, file: File, sink: FileSink) -> None:
        self.brought.append(file.name)
        self.before(file.name)
        body = self.bodies[file.name]
        for span in sink.begin(ObjectInfo(file.name, len(body), f'"{self.version}-{file.name}"')):
            for at in range(0, span.length, 1 << 20):
                sink.write(at, body[at : at + (1 << 20)])


# -- a copy ------------------------------------------------------------------------------------------------------------


def states_below(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Of everything in a directory, without the times at which it was read: a look at a directory sets its own."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (state.st_mode, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for path, state in found.items()}


def test_a_copy_is_whole_and_writable_and_shares_no_inode(source: Path, tmp_path: Path) -> None:
    for path in source.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    target = tmp_path / "a" / "b" / "copy"
    before = os.umask(0o027)
    try:
        copy(source, target)
    finally:
        os.umask(before)
    assert found(target) == BODIES
    assert {stat.S_IMODE(p.stat().st_mode) for p in [target, *target.rglob("*")] if p.is_dir()} == {0o750}
    assert {stat.S_IMODE(p.stat().st_mode) for p in target.rglob("*") if p.is_file()} == {0o640}
    assert {p.stat().st_nlink for p in target.rglob("*") if p.is_file()} == {1}
    assert {int(p.stat().st_mtime) for p in target.rglob("*") if p.is_file()} == {1_700_000_000}
    (target / "config.json").write_bytes(b"mine")
    assert found(source) == BODIES
    assert left_beside(target) == []


def test_an_empty_directory_is_filled_and_stays_the_same_directory(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir(mode=0o700)
    inode = target.stat().st_ino
    copy(source, target)
    assert found(target) == BODIES
    assert (target.stat().st_ino, stat.S_IMODE(target.stat().st_mode)) == (inode, 0o700)
    assert left_beside(target) == []


def test_the_second_copy_writes_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy(source, target)
    steps: list[str] = []
    host.on_step(lambda call, subject: steps.append(call))
    copy(source, target)
    assert steps == []


def test_only_what_is_missing_is_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    some = {name: body for name, body in BODIES.items() if name.startswith("model")}
    copy(source, target, some)
    inode = (target / "model-00001.bin").stat().st_ino
    copy(source, target)
    assert found(target) == BODIES
    assert (target / "model-00001.bin").stat().st_ino == inode


def test_files_of_others_stay(source: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "copy", {"log.txt": b"of the user", "deep/log": b"too"})
    copy(source, target)
    assert found(target) == BODIES | {"log.txt": b"of the user", "deep/log": b"too"}


def test_a_directory_copied_to_itself_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    copy(source, target_of(tmp_path / "link"), overwrite=True)
    assert found(source) == BODIES


def test_without_a_version_the_source_s_time_tells_it(source: Path, tmp_path: Path) -> None:
    target, files = tmp_path / "copy", Manifest.of(File(name, len(body)) for name, body in BODIES.items())
    copy_tree(source, files, target)
    copy_tree(source, files, target)
    (source / "config.json").write_bytes(b"[]")
    with pytest.raises(errors.Foreign):
        copy_tree(source, files, target)
    assert found(target) == BODIES


def test_a_size_that_nobody_told_is_what_came(source: Path, tmp_path: Path) -> None:
    files = Manifest.of(File(name, None, "v") for name in BODIES)
    copy_tree(source, files, tmp_path / "copy")
    copy_tree(source, files, tmp_path / "copy")
    assert found(tmp_path / "copy") == BODIES


def test_a_source_that_is_written_to_meanwhile_is_told(source: Path, tmp_path: Path) -> None:
    def append(call: str, subject: str) -> None:
        if call in ("copy_range", "clone"):
            with open(source / "model-00001.bin", "ab") as file:
                file.write(b"x")

    host.on_step(append)
    with pytest.raises(errors.RemoteChanged):
        copy(source, tmp_path / "copy")
    assert left_beside(tmp_path / "copy") == []
    assert not (tmp_path / "copy").exists()


def test_blocks_are_shared_where_the_file_system_can(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is asked for room."""

    def clone(source: int, target: int) -> bool:
        os.pwrite(target, os.pread(source, 1 << 24, 0), 0)
        return True

    monkeypatch.setattr(host, "clone", clone)
    monkeypatch.setattr(host, "free_bytes", lambda path: 0)
    steps: list[str] = []
    host.on_step(lambda call, subject: steps.append(call))
    copy(source, tmp_path / "copy")
    assert found(tmp_path / "copy") == BODIES
    assert {"copy_range", "pwrite", "link"}.isdisjoint(steps)


def test_bytes_are_written_where_the_kernel_cannot_copy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "copy_range", lambda *args: 0)
    copy(source, tmp_path / "copy")
    assert found(tmp_path / "copy") == BODIES


def test_progress_ends_with_all(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    copy(source, tmp_path / "copy", on_progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, BODIES.values()))
    assert told[-1] == (total, total)
    assert told == sorted(told)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_path_is_what_the_user_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert target_of("~/copy") == target_of("copy/") == target_of(tmp_path / "x" / ".." / "copy") == tmp_path / "copy"
    assert target_of("link/copy") == tmp_path / "real" / "copy"
    with pytest.raises(errors.ConfigError):
        target_of("")


def test_a_link_that_is_the_target_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("other")
    copy(source, target_of(tmp_path / "link"))
    assert found(tmp_path / "other") == BODIES
    assert (tmp_path / "link").is_symlink()


def test_a_long_name_has_a_part_too(source: Path, tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    copy(source, target)
    assert found(target) == BODIES
    assert left_beside(target) == []


# -- what stands there already -----------------------------------------------------------------------------------------


def touched(target: Path) -> None:
    os.utime(target / "config.json")


def edited(target: Path) -> None:
    (target / "config.json").write_bytes(b"[]")


def another_size(target: Path) -> None:
    status = (target / "config.json").stat()
    (target / "config.json").write_bytes(b"[1]")
    os.utime(target / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))


def a_link(target: Path) -> None:
    (target / "config.json").rename(target.parent / "other")
    (target / "config.json").symlink_to(target.parent / "other")


def a_dead_link(target: Path) -> None:
    (target / "config.json").unlink()
    (target / "config.json").symlink_to("nowhere")


@pytest.mark.parametrize("change", [touched, edited, another_size, a_link, a_dead_link])
def test_a_file_that_is_not_ours_is_not_overwritten(source: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    target = tmp_path / "copy"
    copy(source, target)
    (target / "deep" / "notes.txt").unlink()
    change(target)
    before = states_below(target)
    with pytest.raises(errors.Foreign, match=r"config\.json") as caught:
        copy(source, target)
    assert caught.value.path == str(target / "config.json")
    assert isinstance(caught.value, FileExistsError)
    assert caught.value.errno == errno.EEXIST
    assert states_below(target) == before  # nothing was written, not even what is missing
    copy(source, target, overwrite=True)
    assert found(target) == BODIES
    assert not (target / "config.json").is_symlink()
    assert left_beside(target) == []


def test_another_version_of_the_same_size_is_another_file(source: Path, tmp_path: Path) -> None:
    """Within one second of the remote's clock."""
    target, other = tmp_path / "copy", {name: bytes(reversed(body)) for name, body in BODIES.items()}
    copy(source, target)
    write(source, other)
    with pytest.raises(errors.Foreign):
        copy(source, target, other, version="2")
    copy(source, target, other, version="2", overwrite=True)
    assert found(target) == other


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_is_never_replaced(source: Path, tmp_path: Path, overwrite: bool) -> None:
    target = write(tmp_path / "copy", {"config.json/log": b"of the user"})
    with pytest.raises(errors.Foreign, match="a directory"):
        copy(source, target, overwrite=overwrite)
    assert found(target) == {"config.json/log": b"of the user"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_target(source: Path, tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "copy"
    target.write_bytes(b"of the user")
    with pytest.raises(errors.Foreign):
        copy(source, target, overwrite=overwrite)
    assert target.read_bytes() == b"of the user"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_links_in_the_target_are_not_followed(source: Path, tmp_path: Path, kind: str) -> None:
    target, outside = tmp_path / "copy", write(tmp_path / "other", {"notes.txt": b"elsewhere"})
    target.mkdir()
    if kind == "link":
        (target / "deep").symlink_to(outside)
    else:
        (target / "deep").write_bytes(b"of the user")
    with pytest.raises(errors.Foreign, match="deep"):
        copy(source, target)
    copy(source, target, overwrite=True)
    assert found(target) == BODIES
    assert found(outside) == {"notes.txt": b"elsewhere"}


@pytest.mark.parametrize("bodies", [{}, BODIES], ids=["alone", "beside files"])
def test_a_file_in_the_way_of_an_empty_directory(source: Path, tmp_path: Path, bodies: dict[str, bytes]) -> None:
    manifest, target = Manifest(listed(bodies).files, ("none", "with/none")), tmp_path / "copy"
    copy(source, target, bodies)
    write(target, {"none": b"of the user", "with": b"of the user"})
    with pytest.raises(errors.Foreign, match="none"):
        copy_tree(source, manifest, target)
    copy_tree(source, manifest, target, overwrite=True)
    assert found(target) == bodies
    assert (target / "none").is_dir()
    assert (target / "with" / "none").is_dir()


def test_what_lies_behind_a_link_is_not_taken_for_ours(source: Path, tmp_path: Path) -> None:
    target, outside = tmp_path / "copy", tmp_path / "other"
    copy(source, outside)
    target.mkdir()
    (target / "deep").symlink_to(outside / "deep")
    copy(source, target, overwrite=True)
    assert found(target) == BODIES
    assert not (target / "deep").is_symlink()
    assert found(outside) == BODIES


@pytest.mark.parametrize("existing", [False, True])
def test_what_appears_meanwhile_is_not_overwritten(source: Path, tmp_path: Path, existing: bool) -> None:
    target = tmp_path / "copy"
    if existing:
        target.mkdir()

    def intrude(call: str, subject: str) -> None:
        if call == "set_mtime" and not (target / "config.json").exists():
            write(target, {"config.json": b"of the user"})

    host.on_step(intrude)
    with pytest.raises(errors.Foreign):
        copy(source, target)
    assert (target / "config.json").read_bytes() == b"of the user"
    assert left_beside(target) == []
    assert not (target / copying.PART).exists()


# -- several at once, and killed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("existing", [False, True])
def test_a_killed_copy_is_ended_by_the_next(source: Path, quick_path: Path, existing: bool) -> None:
    target, deaths = quick_path / "copy", []
    for step in itertools.count():
        if existing:
            target.mkdir()
            (target / "log.txt").write_bytes(b"of the user")
        death = death_of(fork_to_die(step, lambda: copy(source, target)))
        deaths.append(death)
        assert set(left_beside(target)) <= {".copy.forebay-part"}
        if target.exists():
            whole = {name: body for name, body in found(target).items() if not name.startswith(copying.PART)}
            assert whole.items() <= (BODIES | {"log.txt": b"of the user"}).items()
            assert existing or whole == BODIES
        copy(source, target)
        assert found(target) == BODIES | ({"log.txt": b"of the user"} if existing else {})
        assert left_beside(target) == []
        shutil.rmtree(target)
        if death is None:
            break
    assert len(deaths) > 12


def test_the_next_one_copies_only_what_the_killed_one_had_not(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "COPIES", 1)
    target = tmp_path / "copy"
    step = steps_of(lambda: copy(source, tmp_path / "other")).index("rename")
    assert death_of(fork_to_die(step, lambda: copy(source, target))) is not None
    assert {"create", "copy_range", "clone"}.isdisjoint(steps_of(lambda: copy(source, target)))


def steps_of(work: Callable[[], object]) -> list[str]:
    steps: list[str] = []
    host.on_step(lambda call, subject: steps.append(call))
    work()
    host.on_step(None)
    return steps


@pytest.mark.parametrize("first", ["new", "existing"])
def test_a_part_of_another_kind_of_call_is_used_or_removed(source: Path, tmp_path: Path, first: str) -> None:
    """Killed where there was no directory, ended where there is one; and the other way round."""
    target = tmp_path / "copy"
    if first == "existing":
        target.mkdir()
    step = steps_of(lambda: copy(source, tmp_path / "other")).index("rename")
    assert death_of(fork_to_die(step, lambda: copy(source, target))) is not None
    if first == "existing":
        shutil.rmtree(target)
    else:
        target.mkdir()
    copy(source, target)
    assert found(target) == BODIES
    assert left_beside(target) == []


def test_a_part_of_another_version_is_not_used(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    step = steps_of(lambda: copy(source, tmp_path / "other")).index("rename")
    assert death_of(fork_to_die(step, lambda: copy(source, target))) is not None
    other = {"config.json": b"[]", "deep": b"a file now", "more/config.json": b"1"}
    shutil.rmtree(source)
    write(source, other)
    copy(source, target, other, version="2")
    assert found(target) == other


@pytest.mark.parametrize("what", ["file", "link", "broken"])
def test_what_stands_where_the_part_goes_is_removed_and_not_followed(source: Path, tmp_path: Path, what: str) -> None:
    part, outside = tmp_path / ".copy.forebay-part", write(tmp_path / "other", {"a": b"elsewhere"})
    if what == "file":
        part.write_bytes(b"")
    elif what == "link":
        part.symlink_to(outside)
    else:
        write(part, {"config.json/x": b"", "deep": b"", "stray": b""})
    copy(source, tmp_path / "copy")
    assert found(tmp_path / "copy") == BODIES
    assert found(outside) == {"a": b"elsewhere"}


def test_processes_without_a_cache_copy_one_after_the_other(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "copy"

    def work() -> int:
        with locked(target):
            return len(steps_of(lambda: copy(source, target)))

    children = [fork(work) for _ in range(4)]
    assert sorted(child.result() > 0 for child in children) == [False, False, False, True]
    assert found(target) == BODIES


def is_locked(directory: Path) -> bool:
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("before", [False, True], ids=["made", "replaced"])
def test_a_directory_that_appears_while_its_lock_is_waited_for_is_locked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Those who come later lock that: two would copy at once, and one would sweep what the other stages."""
    target, flock, waits = tmp_path / "copy", fcntl.flock, itertools.count()
    if before:
        target.mkdir()

    def late(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and next(waits) == 0:  # who had the lock until now, and let go
            if before:
                target.rename(tmp_path / "before")
            target.mkdir()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(target):
        assert is_locked(target)
        assert not is_locked(tmp_path)
    assert not is_locked(target)


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    held, told = os.pipe()

    def hold() -> None:
        with locked(tmp_path / "copy"):
            os.write(told, b"x")
            signal.pause()

    child: Child = fork(hold)
    os.read(held, 1)
    assert is_locked(tmp_path)  # the copy itself is not there yet
    child.kill()
    assert not is_locked(tmp_path)
    with locked(tmp_path / "copy"):
        assert is_locked(tmp_path)
    os.close(held)
    os.close(told)


# -- straight from the remote ------------------------------------------------------------------------------------------


def test_files_come_straight_from_the_remote(tmp_path: Path) -> None:
    target, remote = tmp_path / "copy", Remote()
    told: list[tuple[int, int]] = []
    fetch_tree(listed(), target, remote, on_progress=lambda done, total: told.append((done, total)))
    assert found(target) == BODIES
    assert told[-1][0] == told[-1][1] == sum(map(len, BODIES.values()))
    fetch_tree(listed(), target, remote)
    assert sorted(remote.brought) == sorted(BODIES)  # each once
    assert left_beside(target) == []


def test_a_copy_and_a_fetch_of_one_version_are_the_same(source: Path, tmp_path: Path) -> None:
    remote = Remote()
    copy(source, tmp_path / "copy")
    fetch_tree(listed(), tmp_path / "copy", remote)
    assert remote.brought == []


def test_files_without_a_version_are_fetched_each_time(tmp_path: Path) -> None:
    files = Manifest.of(File(name, len(body)) for name, body in BODIES.items())
    fetch_tree(files, tmp_path / "copy", Remote())
    with pytest.raises(errors.Foreign):
        fetch_tree(files, tmp_path / "copy", Remote())
    fetch_tree(files, tmp_path / "copy", remote := Remote(), overwrite=True)
    assert sorted(remote.brought) == sorted(BODIES)


def test_an_etag_is_the_same_with_and_without_its_quotes(tmp_path: Path) -> None:
    files = Manifest.of(file._replace(validator=(file.validator or "").strip('"')) for file in listed().files)
    fetch_tree(files, tmp_path / "copy", Remote())
    assert found(tmp_path / "copy") == BODIES


@pytest.mark.parametrize("wrong", ["version", "size", "short"])
def test_another_version_than_was_listed_is_told(tmp_path: Path, wrong: str) -> None:
    remote = Remote(version="2" if wrong == "version" else "1")
    if wrong == "size":
        remote.bodies = {name: body + b"x" for name, body in BODIES.items()}

    def cut(file: File, sink: FileSink) -> None:
        body = BODIES[file.name]
        sink.begin(ObjectInfo(file.name, len(body)))
        sink.write(0, body[:-1])

    with pytest.raises(errors.RemoteChanged):
        fetch_tree(listed(), tmp_path / "copy", cut if wrong == "short" else remote)
    assert list(tmp_path.iterdir()) == []


def test_a_fetch_that_begins_again_keeps_nothing_of_before(tmp_path: Path) -> None:
    def twice(file: File, sink: FileSink) -> None:
        body = BODIES[file.name]
        sink.begin(ObjectInfo(file.name, None))
        sink.write(0, bytes(len(body) + 1000))
        sink.begin(ObjectInfo(file.name, None))
        sink.write(0, body)

    fetch_tree(listed(), tmp_path / "copy", twice)
    assert found(tmp_path / "copy") == BODIES


@pytest.mark.parametrize("existing", [False, True])
def test_an_error_leaves_nothing_behind(tmp_path: Path, existing: bool) -> None:
    target, remote = tmp_path / "copy", Remote()
    if existing:
        write(target, {"log.txt": b"of the user"})

    def fail(name: str) -> None:
        if name == "deep/notes.txt":
            raise errors.RemoteUnavailable("gone", url=name, attempts=1, done=0)

    remote.before = fail
    with pytest.raises(errors.RemoteUnavailable):
        fetch_tree(listed(), target, remote)
    assert left_beside(target) == []
    assert found(tmp_path) == ({"copy/log.txt": b"of the user"} if existing else {})


def test_an_interrupt_ends_it_at_once_though_a_remote_hangs(tmp_path: Path) -> None:
    """The thread that hangs writes nothing any more when it wakes."""
    target, remote, gate, woke = tmp_path / "copy", Remote(), threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "config.json":
            os.kill(os.getpid(), signal.SIGINT)
            assert gate.wait(60)
            woke.set()

    remote.before = hang
    try:
        with pytest.raises(KeyboardInterrupt):
            fetch_tree(listed(), target, remote)
        assert list(tmp_path.iterdir()) == []
    finally:
        gate.set()
    assert woke.wait(60)
    for thread in threading.enumerate():
        if thread.name.startswith("forebay-file"):
            thread.join(60)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_fetch_brings_only_what_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "copy"

    def work() -> None:
        remote = Remote()

        def die(name: str) -> None:
            if name == "empty":  # the smallest comes last
                os.kill(os.getpid(), signal.SIGKILL)

        remote.before = die
        fetch_tree(listed(), target, remote, jobs=1)

    assert fork(work).wait() == -signal.SIGKILL
    assert left_beside(target) == [".copy.forebay-part"]
    remote = Remote()
    fetch_tree(listed(), target, remote)
    assert remote.brought == ["empty"]
    assert found(target) == BODIES


# -- a full disk -------------------------------------------------------------------------------------------------------


def test_too_little_room_is_told_before_anything_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: 1000)
    remote = Remote()
    with pytest.raises(errors.NoSpace) as caught:
        fetch_tree(listed(), tmp_path / "copy", remote, budget=5)
    assert (caught.value.need, caught.value.free, caught.value.budget) == (sum(map(len, BODIES.values())), 1000, 5)
    assert caught.value.errno == errno.ENOSPC
    assert remote.brought == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "call", "existing"),
    [*((errno.ENOSPC, call, False) for call in ("mkdir", "create", "copy_range")), (errno.EDQUOT, "copy_range", True)],
)
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(source: Path, tmp_path: Path, code: int, call: str, existing: bool) -> None:
    target = tmp_path / "copy"
    if existing:
        write(target, {"log.txt": b"of the user"})

    def full(name: str, subject: str) -> None:
        if name == call:
            raise OSError(code, os.strerror(code))

    host.on_step(full)
    with pytest.raises(errors.NoSpace):
        copy(source, target)
    assert left_beside(target) == []
    assert target.exists() == existing
    assert not existing or found(target) == {"log.txt": b"of the user"}


@pytest.mark.root
def test_a_really_full_disk(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        with pytest.raises(errors.NoSpace) as caught:
            copy(source, disk / "copy")
        assert 0 < caught.value.free <= 2 << 20
        with pytest.raises(errors.NoSpace):
            fetch_tree(listed(), disk / "copy", Remote())
        assert list(disk.iterdir()) == []
        small = {name: body for name, body in BODIES.items() if len(body) < 1 << 20}
        copy(source, disk / "copy", small)
        assert found(disk / "copy") == small
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# -- versions and crews ------------------------------------------------------------------------------------------------


def test_a_version_has_its_time() -> None:
    one = File("a", 1, '"etag"', 1_700_000_000.75)
    ns = stamp(one)
    assert ns is not None
    assert ns // 1_000_000_000 == 1_700_000_000
    assert stamp(one._replace(name="b")) == ns
    assert len({stamp(one._replace(validator=f"{n}")) for n in range(100)}) == 100
    assert stamp(File("a", 1)) is None
    for strange in (-5.0, 1e300):
        assert 0 <= (stamp(File("a", 1, None, strange)) or 0) < 1 << 63


@pytest.mark.parametrize("unit", [1, 100, 1000, 1_000_000, 1_000_000_000])
def test_a_time_is_known_again_by_a_file_system_that_rounds_it(unit: int) -> None:
    ns = 1_700_000_000_123_456_789
    assert has_stamp(ns - ns % unit, ns)
    assert not has_stamp(ns - ns % unit + unit, ns)
    assert not has_stamp(ns, None)


def test_a_signal_ends_the_wait_for_the_lock_of_another(source: Path, tmp_path: Path) -> None:
    (target := tmp_path / "target").mkdir()
    fd = os.open(target, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with forebay.Cache(tmp_path / "root", enabled=False) as cache, interrupted("locked", lambda: fcntl.flock(fd, fcntl.LOCK_UN)):
        cache.copy_directory(source, target)
    os.close(fd)
    assert found(target) == {}
