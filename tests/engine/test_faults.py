"""Faults of the disk and of other people: the cache passes them by, and is sound again without a word from anybody."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.store import Settings, Store
from forebay._kernel import host
from forebay._model import ObjectInfo, Victim
from tests.harness import KiB, MiB, assert_counted, assert_settled, bytes_of, data_usage, opened, single
from tests.processes import Child, Gate, end, fork, in_child

BLOB, OTHER, SMALL = os.urandom(100 * KiB), os.urandom(110 * KiB), os.urandom(700)


def fill(place: Path, budget: int = 2 * MiB) -> None:
    with opened(place, budget) as store:
        for n in range(4):
            store.put("v", f"k{n}", BLOB)
            store.put("v", f"s{n}", SMALL)


def no_hook() -> None:
    host.on_step(None)


# -- a part of the root goes, or is scribbled over, while others have it open -------------------------------------------


class Far:
    """A process that has the root open, and does what it is told."""

    def __init__(self, place: Path) -> None:
        import multiprocessing

        self._pipe, its = multiprocessing.Pipe()
        self.child = fork(lambda: self._serve(place, its))
        its.close()

    def _serve(self, place: Path, pipe: Any) -> None:
        self._pipe.close()
        with opened(place, 2 * MiB) as store:
            while True:
                name, *arguments = pipe.recv()
                if name == "end":
                    return
                try:
                    pipe.send(getattr(self, f"_{name}")(store, *arguments))
                except errors.CacheFault as error:
                    pipe.send(error)

    @staticmethod
    def _put(store: Store, key: str, data: bytes) -> None:
        store.put("v", key, data)

    @staticmethod
    def _get(store: Store, key: str) -> bytes | None:
        return bytes_of(store, key)

    @staticmethod
    def _leased(store: Store, key: str) -> bytes | None:
        with contextlib.closing(lease) if (lease := store.lease("v", key)) else contextlib.nullcontext():
            return Path(lease).read_bytes() if lease else None

    def __call__(self, *words: Any) -> Any:
        self._pipe.send(words)
        if not self._pipe.poll(30):
            raise AssertionError(f"{words[0]} hangs")
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(("end",))
        self.child.result()
        self._pipe.close()


def scribble(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("harm", ["delete", "scribble"])
@pytest.mark.parametrize("what", ["root", "catalog.sqlite", "catalog.sqlite-wal", "shared", "locks", "FORMAT", "counters"])
def test_two_processes_go_on_after_harm(quick_path: Path, what: str, harm: str) -> None:
    """Both had the root open. From then on each serves exact bytes or misses, and what one puts the other gets."""
    place = quick_path / "root"
    if harm == "scribble" and what in ("root", "shared", "locks", "catalog.sqlite-wal"):
        pytest.skip("a directory, or mapped by those who live: writing there is what they do themselves")
    one, two = Far(place), Far(place)
    for n in range(3):
        one("put", f"k{n}", BLOB)
        two("put", f"s{n}", SMALL)
    for far in (one, two):
        assert [far("get", f"k{n}") for n in range(3)] == [BLOB] * 3
    target = place if what == "root" else place / what
    if harm == "scribble":
        scribble(target)
    elif target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    for turn, (near, far) in enumerate([(one, two), (two, one), (one, two), (two, one)]):
        results = [near("put", "k0", OTHER + bytes([turn])), near("put", "new", SMALL + bytes([turn]))]
        assert turn == 0 or results == [None, None], results
        for who in (near, far):
            assert who("get", "k1") in (None, BLOB)
            assert who("get", "s1") in (None, SMALL)
            if turn:  # before its first write a process may go on with what it had
                assert who("get", "k0") == OTHER + bytes([turn])
                assert who("leased", "k0") == OTHER + bytes([turn])
                assert who("get", "new") == SMALL + bytes([turn])
    one.end()
    two.end()

    def look() -> None:
        with opened(place, 2 * MiB) as store:
            assert what == "FORMAT" or bytes_of(store, "k0") == OTHER + bytes([3])  # a new FORMAT makes a new root
            store.put("v", "next", SMALL)
            assert store.check(deep=True) == []

    in_child(look)
    assert_counted(place, 2 * MiB)


# -- blobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["truncated", "flipped", "grown", "emptied", "deleted", "a link elsewhere"])
def test_s03_a_damaged_blob_is_never_served(quick_path: Path, harm: str) -> None:
    place = quick_path / "root"
    in_child(lambda: fill(place))

    def hurt() -> None:
        with opened(place) as store:
            found = next(entry for entry in store.seeing.entries() if entry.key == "k1")
            path = store.root.blob(found.id, found.suffix)
        path.chmod(0o600)
        if harm == "truncated":
            os.truncate(path, 4096)
        elif harm == "emptied":
            os.truncate(path, 0)
        elif harm == "grown":
            with open(path, "ab") as file:
                file.write(b"x")
        elif harm == "flipped":
            with open(path, "r+b") as file:
                file.seek(54_321)
                file.write(bytes([BLOB[54_321] ^ 4]))
        else:
            path.unlink()
            if harm == "a link elsewhere":
                (quick_path / "mine").write_bytes(BLOB)
                path.symlink_to(quick_path / "mine")

    def read() -> None:
        with opened(place) as store:
            assert [problem.kind for problem in store.check(deep=True)] in (["damaged"], ["lost"], ["lost", "damaged"])
            assert bytes_of(store, "k1") is None
            assert store.lease("v", "k1") is None
            assert bytes_of(store, "k0") == BLOB
            store.put("v", "k1", BLOB)
            assert bytes_of(store, "k1") == BLOB
            store.put("v", "next", SMALL)
            assert store.check(deep=True) == []
            assert store.seeing.counts()["damaged"] >= 1

    in_child(hurt)
    in_child(read)
    if harm == "a link elsewhere":
        assert (quick_path / "mine").read_bytes() == BLOB
    assert_settled(place, 2 * MiB)


def test_s03_a_flipped_bit_of_a_small_value(quick_path: Path) -> None:
    place = quick_path / "root"
    in_child(lambda: fill(place))
    con = sqlite3.connect(place / "catalog.sqlite")
    ((id, data),) = con.execute("SELECT p.id, p.data FROM payloads p JOIN entries e ON e.id = p.id WHERE e.key = 's1'").fetchall()
    con.execute("UPDATE payloads SET data = ? WHERE id = ?", (bytes([data[0] ^ 1]) + data[1:], id))
    con.commit()
    con.close()

    def read() -> None:
        with opened(place) as store:
            assert [problem.kind for problem in store.check(deep=True)] == ["damaged"]
            assert bytes_of(store, "s1") is None
            assert bytes_of(store, "s2") == SMALL
            store.put("v", "s1", SMALL)
            assert store.check(deep=True) == []

    in_child(read)
    assert_settled(place, 2 * MiB)


# -- no room, no rights -------------------------------------------------------------------------------------------------


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    if os.geteuid():
        pytest.skip("mounting needs root")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mounted{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "forebay-test", place], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


def put_many(store: Store, count: int, size: int) -> int:
    kept = 0
    for n in range(count):
        try:
            store.put("v", f"n{n}", bytes([n % 256]) * size)
            kept += 1
        except errors.CacheFault:
            continue
    return kept


@pytest.mark.root
@pytest.mark.parametrize("size", [300, 16 * KiB, 300 * KiB], ids=["values", "large values", "blobs"])
def test_s13_a_full_tmpfs(tmpfs: Callable[[str], Path], size: int) -> None:
    """The budget is far above the disk. Nothing but faults of the cache reaches the caller, all that is served is right, and evicting
    still works: once another program gives the room back, writes succeed again."""
    place = tmpfs("size=32m") / "root"

    def work() -> None:
        with opened(place, 1 << 30) as store:
            store.put("v", "first", BLOB)
            hog = place.parent / "hog"
            with contextlib.suppress(OSError), open(hog, "wb") as file:
                while True:
                    file.write(bytes(64 * KiB))
            put_many(store, 200, size)
            assert bytes_of(store, "first") in (None, BLOB)
            for n in range(200):
                assert bytes_of(store, f"n{n}") in (None, bytes([n % 256]) * size)
            assert store.check(deep=True) == []
            hog.unlink()
            assert put_many(store, 200, size) >= (200 if size < 100 * KiB else 40)
            assert store.check(deep=True) == []

    in_child(work)
    in_child(lambda: put_next(place))
    assert_counted(place, 1 << 30)


@pytest.mark.root
def test_s13_on_a_disk_without_a_block_what_gives_a_path_raises_no_space(tmpfs: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where it is the catalog that cannot grow; what gives bytes gives them."""
    place, source = tmpfs("size=32m") / "root", tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    files = [source / "folder" / f"{n}" for n in range(30)]
    for file in files:
        file.write_bytes(os.urandom(100 * KiB))

    def work() -> None:
        with forebay.Cache(place, budget=1 << 30, min_free=0) as cache:
            for _ in range(4):
                with open(place.parent / "hog", "ab", buffering=0) as hog, contextlib.suppress(OSError):
                    while hog.write(bytes(4 * KiB)):
                        continue
                for file in files:
                    assert cache.read(file, force=True) == file.read_bytes()
                    with contextlib.suppress(errors.NoSpace), cache.local(file, force=True) as path:
                        assert Path(path).read_bytes() == file.read_bytes()
            with pytest.raises(errors.NoSpace), cache.directory(source / "folder", force=True):
                raise AssertionError("there was no room")
            (place.parent / "hog").unlink()
            with cache.directory(source / "folder", force=True) as path:
                assert len(os.listdir(path)) == 30

    in_child(work)


def put_next(place: Path) -> None:
    with opened(place) as store:
        store.put("v", "next", SMALL)
        assert store.check(deep=True) == []


@pytest.mark.root
def test_s13_min_free_shrinks_the_cache(tmpfs: Callable[[str], Path]) -> None:
    """Another program fills the disk: the next write evicts until so much is free again."""
    place = tmpfs("size=64m") / "root"

    def work() -> None:
        store = Store.open(place, Settings(budget=1 << 30, min_free=8 * MiB))
        put_many(store, 30, MiB)
        before = len(store.seeing.entries())
        with open(place.parent / "hog", "wb") as file:
            file.write(bytes(host.disk(place).free - 2 * MiB))
        assert store.make_room()
        assert host.disk(place).free >= 8 * MiB
        assert len(store.seeing.entries()) < before
        store.put("v", "new", bytes(MiB))
        assert host.disk(place).free >= 8 * MiB - 64 * KiB
        assert store.check(deep=True) == []
        store.close()

    in_child(work)


@pytest.mark.root
def test_s13_no_inodes_left(tmpfs: Callable[[str], Path]) -> None:
    """Files are evicted for the next ones, as for bytes, also where another program has taken the inodes; small values need none."""
    place = tmpfs("size=64m,nr_inodes=700") / "root"

    def take_the_rest() -> None:
        with contextlib.suppress(OSError):
            for n in range(700):
                (place.parent / f"file {n}").touch()

    def work() -> None:
        with opened(place, 1 << 30) as store:
            assert put_many(store, 500, 20 * KiB) == 500
            assert bytes_of(store, "n499") == bytes([499 % 256]) * 20 * KiB
            assert host.disk(place).inodes_free < 300 < len(store.seeing.entries()) + 128
            take_the_rest()
            store.put("v", "value", SMALL)
            store.put("v", "blob", BLOB)
            take_the_rest()
            held = [lease for entry in store.seeing.entries() if (lease := store.lease("v", entry.key)) is not None]
            take_the_rest()
            with pytest.raises(errors.NoSpace, match="inodes"):
                store.put("v", "one more", BLOB)
            store.put("v", "value", SMALL + b"2")
            for lease in held:
                lease.close()
            assert store.check(deep=True) == []

    in_child(work)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("data", [SMALL, BLOB], ids=["value", "blob"])
def test_any_change_may_fail(quick_path: Path, code: int, data: bytes) -> None:
    """Each change of a file in turn raises what the disk may raise: the call is a fault of the cache, or succeeds; the root is sound,
    and the next call works."""
    place = quick_path / "root"

    def work() -> int:
        failed = 0
        with opened(place, MiB) as store:
            for n in range(8):
                store.put("v", f"k{n}", BLOB)
            for step in range(100):
                left = [step]

                def hook(call: str, subject: str, left: list[int] = left) -> None:
                    left[0] -= 1
                    if left[0] == -1:
                        raise OSError(code, os.strerror(code))

                before = bytes_of(store, "a")
                host.on_step(hook)
                try:
                    store.put("v", "a", data + bytes([step]))
                    wanted = {data + bytes([step])}
                except errors.CacheFault:
                    wanted = {before, data + bytes([step])}  # a fault after the commit: it is there
                    failed += 1
                finally:
                    no_hook()
                assert bytes_of(store, "a") in wanted
                assert store.check(deep=True) == [], f"after a fault at step {step}"
                store.put("v", f"k{step % 8}", BLOB)
                assert bytes_of(store, f"k{step % 8}") == BLOB
                if left[0] >= 0:
                    break
        return failed

    assert in_child(work) >= 3
    in_child(lambda: put_next(place))
    found = assert_counted(place, MiB)
    assert found.leaving == 0


@pytest.mark.root
def test_s31_a_read_only_root_of_another_user() -> None:
    """``chmod -R a-w``, opened by who owns nothing of it: hits work, and nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "root"

        def prefill() -> None:
            os.umask(0)
            fill(place)

        in_child(prefill)
        subprocess.run(["chmod", "-R", "a+rX,a-w", place], check=True)
        before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}

        def read() -> None:
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
            with pytest.raises(OSError):
                (place / "x").touch()
            store = Store.open(place, Settings(), read_only=True)
            assert bytes_of(store, "k1") == BLOB
            assert bytes_of(store, "s1") == SMALL
            assert bytes_of(store, "missing") is None
            lease = store.lease("v", "k2")
            assert lease is not None
            assert Path(lease).read_bytes() == BLOB
            lease.close()
            with pytest.raises(errors.CacheFault):
                store.put("v", "new", SMALL)
            assert len(store.seeing.entries()) == 8
            assert store.check(deep=True) == []
            store.close()

        in_child(read)
        assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


# -- stopped processes -------------------------------------------------------------------------------------------------


def test_s08_a_stopped_fetcher_is_named(quick_path: Path, children: Callable[..., Child], caplog: pytest.LogCaptureFixture) -> None:
    """Who waits says for what and for whom; with a timeout it raises the same facts; when the fetcher is killed, it takes over."""
    place, said = quick_path / "root", Gate()

    def fetcher() -> None:
        with opened(place, 8 * MiB) as store:
            with store.locks.hold("v", "stuck"), store.writing("v", "stuck") as writing:
                writing.begin(ObjectInfo("", 3 * MiB, '"1"', strong=True))
                writing.write(0, bytes(MiB))
                said.open()
                signal.pause()

    child = children(fetcher)
    said.wait()
    child.stop()

    def waiter() -> None:
        waits: list[Any] = []
        with opened(place) as store:
            with pytest.raises(errors.WaitTimeout) as found:
                single(store, "v", "stuck", lambda: None, lambda: 1, timeout=0.5, on_wait=waits.append)
            assert found.value.what == "stuck"
            assert str(child.pid) in found.value.holder
            assert found.value.waited >= 0.5
            assert waits
            assert (waits[0].done, waits[0].total) == (MiB, 3 * MiB)
            assert str(child.pid) in waits[0].holder

    def patient() -> list[str]:
        from forebay._kernel import waits

        lines: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        logging.getLogger("forebay").addHandler(Keep())
        waits.wait_for.__kwdefaults__["say_after"] = 0.3
        with opened(place) as store:
            hold = store.locks.hold("v", "stuck", timeout=30)
            with store.writing("v", "stuck") as writing:
                assert writing.partial is not None
                assert writing.begin(ObjectInfo("", 3 * MiB, '"1"', strong=True))[0].start == MiB
                writing.write(MiB, bytes(2 * MiB))
                writing.publish()
            hold.release()
            assert store.check(deep=True) == []
        return lines

    in_child(waiter)
    other = children(patient)
    with contextlib.suppress(AssertionError):
        other.wait(1.0)
    child.kill()
    lines = other.result()
    assert any("stuck" in line and str(child.pid) in line for line in lines), lines
    assert_settled(place, 8 * MiB)
    said.close()


def test_s08_a_stopped_writer_does_not_stop_others_for_ever(quick_path: Path, children: Callable[..., Child]) -> None:
    """Stopped inside a transaction: hits need no writer, in a young process neither; who writes waits once, is told who it is, and passes
    by from then on; killed, all goes on."""
    place, said = quick_path / "root", Gate()
    in_child(lambda: fill(place))

    def writer() -> None:
        stopped: list[bool] = []

        def hook(call: str, subject: str) -> None:
            if call == "commit" and not stopped:
                stopped.append(True)
                said.open()
                os.kill(os.getpid(), signal.SIGSTOP)

        with opened(place) as store:
            host.on_step(hook)
            store.put("v", "k1", OTHER)

    child = children(writer)
    said.wait()

    def reader() -> None:
        from forebay._engine.catalog import writer_lock

        assert writer_lock.LONGEST_WAIT == 10.0
        with opened(place) as store:
            writer_lock.LONGEST_WAIT = 0.0  # whoever waits for it is refused at once
            keys = [entry.key for entry in store.seeing.entries("v")]
            assert len(keys) == 8
            for key in keys:
                if key != "k1":  # which is just being replaced
                    assert bytes_of(store, key) is not None
                    lease = store.take("v", key)
                    assert lease is not None
                    assert store.bytes_leased(lease) is not None
                    lease.close()
            store.seeing.counts(), store.seeing.usage()
            assert bytes_of(store, "none", space="no such space") is None
            writer_lock.LONGEST_WAIT = writer_lock.LONG = 0.5
            with pytest.raises(errors.WriterBusy, match=rf"busy.*waited .* s .*process {child.pid} ") as found:
                store.put("v", "new", b"x")
            assert found.value.waited >= 0.5
            writer_lock.LONGEST_WAIT = 1000.0
            for _ in range(3):
                with pytest.raises(errors.WriterBusy, match=rf"still busy.*process {child.pid} "):
                    store.put("v", "new", b"x")
            end(child.pid, signal.SIGCONT)
            store.put("v", "new", b"x")
            assert bytes_of(store, "k1") == OTHER

    in_child(reader)
    assert child.result() is None
    in_child(lambda: put_next(place))
    assert_settled(place, 2 * MiB)
    said.close()


# -- keys --------------------------------------------------------------------------------------------------------------

KEYS = [
    "a", "A", "a/", "a//", "/a", "a?x=1", "a?x=2", "ä", "a\u0308", "../a", "../../etc/passwd", "/etc/passwd", ".", "..", "", " ", "a ",
    "a\n", "a\0b", "a\0c",
    "x" * 200 + "1", "x" * 200 + "2", "y" * 5000, "%2e%2e/a", "a%00", "\u202ea", "😀", "CON", "a:b", "v:a", "a;b", "--",
    "'; DROP TABLE entries; --", "https://h/a", "http://h/a", "https://h/A", "https://H2/a", "\udcff",
]  # fmt: skip


def test_s35_keys_that_nearly_agree_stay_apart(quick_path: Path) -> None:
    place = quick_path / "inside" / "root"
    place.parent.mkdir()
    with opened(place, 32 * MiB) as store:
        for size in (10, 20 * KiB):
            kept = []
            for n, key in enumerate(KEYS):
                try:
                    store.put("v", key, bytes([n]) * size)
                    kept.append((n, key))
                except (UnicodeError, errors.CacheFault):
                    assert key == "\udcff"  # it cannot be written as UTF-8
            assert [bytes_of(store, key) == bytes([n]) * size for n, key in kept] == [True] * len(kept)
            assert len(store.seeing.entries("v")) == len(kept) >= len(KEYS) - 1
        for space in ("V", "v ", "../v", "w"):
            assert bytes_of(store, "a", space) is None
        assert store.check(deep=True) == []
    assert [path.name for folder in (quick_path, place.parent) for path in folder.iterdir()] == ["inside", "root"]
    assert_settled(place, 32 * MiB)


def test_s35_a_key_is_the_same_whatever_the_hash_seed(quick_path: Path) -> None:
    place = quick_path / "root"
    script = (
        "import sys; from forebay._engine.store import Settings, Store; s = Store.open(sys.argv[1], Settings(budget=1 << 20, min_free=0));"
        "h = s.locks.hold('v', 'key'); print(h.keyhash, s.view('v', 'key') is None); s.put('v', 'key', b'1'); s.close()"
    )
    found = []
    for seed, folder in (("0", "/"), ("1", "/tmp"), ("77", str(quick_path))):
        done = subprocess.run(
            ["/usr/bin/env", f"PYTHONHASHSEED={seed}", shutil.which("python3") and os.sys.executable, "-c", script, place],  # type: ignore[attr-defined,list-item]
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(done.stdout.split())
    assert len({keyhash for keyhash, _ in found}) == 1
    assert [missing for _, missing in found] == ["True", "False", "False"]


# -- a face on it ------------------------------------------------------------------------------------------------------


def test_a_cache_that_lost_its_root_goes_on(quick_path: Path) -> None:
    place = quick_path / "root"
    with forebay.Cache(place, budget=MiB, min_free=0) as cache:
        cache.put("a", BLOB)
        buffer = cache.get("a")
        shutil.rmtree(place)
        assert buffer is not None
        assert bytes(buffer) == BLOB
        for turn in range(3):
            cache.put("b", SMALL + bytes([turn]))
            assert bytes(cache.get("b") or b"") == SMALL + bytes([turn])
        assert cache.get_or_put("a", lambda: OTHER) in (OTHER, BLOB)
        assert cache.check(deep=True) == []
    assert_settled(place, MiB)


def test_removed_means_removed_for_who_remembers(quick_path: Path) -> None:
    place = quick_path / "root"
    one, two = Far(place), Far(place)
    one("put", "a", BLOB)
    assert two("get", "a") == BLOB
    with opened(place) as store:
        found = store.seeing.entries()
        assert len(store.remove([Victim(e.name, e.size, e.charge, e.used, e.id) for e in found]).removed) == 1
    assert (one("get", "a"), two("get", "a")) == (None, None)
    one.end()
    two.end()
    assert data_usage(place) == 0
