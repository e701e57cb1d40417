"""The caches of PFIO's names: beside the real ones, call for call, and where those fall short."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import forebay
from forebay._kernel import host
from forebay.adapters import pfio
from forebay.adapters.pfio import FileCache, MultiprocessFileCache, NaiveCache, ReadOnlyFileCache, base
from forebay.adapters.pfio.file import PfioFile
from tests.processes import ProcessGroup, fork_to_die, in_child
from tests.strikes import interrupted

FILLED = [FileCache, MultiprocessFileCache]
both = pytest.mark.parametrize("kind", FILLED)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's cache, and the home directory."""
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "home"


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "place")


def filled(cache: Any, count: int | None = None) -> Any:
    for i in range(len(cache) if count is None else count):
        assert cache.put(i, value(i))
    return cache


def value(i: int) -> bytes:
    return b"%d," % i * (i % 7 + 1)


def content(cache: Any) -> list[Any]:
    return [cache.get(i) for i in range(len(cache))]


# -- beside the real one -----------------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (IndexError, ValueError, TypeError, OSError, RuntimeError, AssertionError) as error:
        return next(
            kind for kind in (io.UnsupportedOperation, IndexError, TypeError, RuntimeError, ValueError, OSError) if isinstance(error, kind)
        )


@pytest.mark.keeps("PFIO itself leaves a descriptor open")
@pytest.mark.parametrize("name", ["FileCache", "MultiprocessFileCache"])
@pytest.mark.parametrize("seed", range(6))
def test_our_cache_answers_as_pfios(tmp_path: Path, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("pfio.cache")
    rng = random.Random(seed)
    how = {"do_pickle": bool(seed % 2), "cache_size_limit": rng.choice([None, 0, 12 * 16 + 60, 1e3, 200.5, True])}
    pair = [getattr(module, name)(12, dir=str(tmp_path / side), **how) for module, side in ((real, "theirs"), (pfio, "ours"))]
    if name == "MultiprocessFileCache":
        monkeypatch.setattr(type(pair[0]), "frozen", property(lambda self: self._frozen), raising=False)  # the real one does not show it
    for _ in range(150):
        i, data = rng.randrange(-1, 13), rng.choice([b"", b"x", bytes(rng.randrange(30)), bytes(300) if rng.random() < 0.1 else b"yy"])
        call = rng.choice(["get", "put", "put", "get_and_cache", "frozen", "multiprocess_safe", "multithread_safe", "len", "none"])
        said = [outcome(functools.partial(ask, cache, call, i, data)) for cache in pair]
        assert said[0] == said[1], (call, i, data)
    if name == "MultiprocessFileCache" or rng.random() < 0.5:
        for cache in pair:
            cache.close()
        said = [(outcome(lambda c=cache: c.get(99)), outcome(lambda c=cache: c.put(99, b"x")), cache.closed) for cache in pair]
        assert said[0] == said[1] == (None, False, True)
    for cache in pair:
        cache.close()


def ask(cache: Any, call: str, i: int, data: bytes) -> Any:
    match call:
        case "get":
            return cache.get(i)
        case "put":
            return cache.put(i, data)
        case "get_and_cache":
            return cache.get_and_cache(i, lambda _: data)
        case "len":
            return len(cache)
        case "none":
            return cache.preload("none")
        case _:
            return getattr(cache, call)


@pytest.mark.parametrize("kind", [*FILLED, ReadOnlyFileCache])
@pytest.mark.parametrize("length", [0, -1, 1 << 64, 1 << 70])
def test_a_length_that_makes_no_sense(kind: Any, length: int, place: str) -> None:
    with pytest.raises(ValueError, match="length"):
        kind(length, dir=place)
    assert not os.path.exists(place)


@both
@pytest.mark.parametrize("limit", [-1, -0.5, "10", b"10", float("nan"), 1j, [1]])
def test_a_limit_that_makes_no_sense(kind: Any, limit: Any, place: str) -> None:
    with pytest.raises(ValueError, match="cache_size_limit"):
        kind(10, dir=place, cache_size_limit=limit)
    assert not os.path.exists(place)


def test_arguments_have_the_places_of_the_real_ones(place: str) -> None:
    with FileCache(3, True, True, place, 1000, False, False) as one, MultiprocessFileCache(3, True, place, 1000, False, False) as two:
        assert (one.multithread_safe, one.do_pickle, one.dir, one.cache_size_limit, one.length, one.closed) == (
            True,
            True,
            place,
            1000,
            3,
            False,
        )
        assert (two.multithread_safe, two.do_pickle, two.dir, two.cache_size_limit, two.length, two.closed) == (
            True,
            True,
            place,
            1000,
            3,
            False,
        )
        assert (one.multiprocess_safe, two.multiprocess_safe) == (False, True)
    cache = ReadOnlyFileCache(3, True, place, False)
    assert (cache.do_pickle, cache.dir, cache.length, cache.closed, cache.frozen) == (True, place, 3, True, True)
    assert NaiveCache(3, True, False).multithread_safe
    assert not FileCache(3).multithread_safe


@both
def test_what_comes_back_is_the_callers_own(kind: Any) -> None:
    np = pytest.importorskip("numpy")
    with kind(2, do_pickle=True) as cache, kind(2) as raw:
        cache.put(0, {"x": np.arange(5)})
        cache.get(0)["x"][:] = 0  # writable, and nobody else's
        assert cache.get(0)["x"].tolist() == [0, 1, 2, 3, 4]
        assert raw.put(1, np.arange(5, dtype="u1"))  # anything that has bytes
        assert raw.get(1) == bytes(range(5))
        assert type(raw.get(1)) is bytes
        with pytest.raises(TypeError):
            raw.put(0, "text")
        with pytest.raises(TypeError):
            raw.get("0")
        assert raw.get(0) is None


@both
def test_the_first_put_over_the_limit_freezes(kind: Any, place: str) -> None:
    with kind(10, dir=place, cache_size_limit=160 + 120) as cache:
        assert cache.put(0, bytes(50))
        assert cache.put(1, bytes(70))
        assert cache.put(5, b"")
        assert not cache.frozen
        assert not cache.put(2, b"x")
        assert cache.frozen
        assert not cache.put(3, b"")
        assert [len(cache.get(i) or b"") for i in range(3)] == [50, 70, 0]


# -- preserved ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("other", FILLED)
def test_what_one_preserves_the_others_preload(kind: Any, other: Any, place: str) -> None:
    with filled(kind(30, dir=place)) as cache:
        assert cache.preserve("kept")
        assert cache.frozen
        assert not cache.put(0, b"more")
        assert not cache.preserve("kept")
        assert not cache.preload("kept")
        assert content(cache) == [value(i) for i in range(30)]
    assert os.listdir(place) == ["kept"]
    with other(30, dir=place) as cache, ReadOnlyFileCache(30, dir=place) as reader:
        assert cache.put(0, b"replaced by what is preloaded")
        assert cache.preload("kept")
        assert not cache.preload("kept")
        assert reader.preload("kept")
        assert content(cache) == content(reader) == [value(i) for i in range(30)]
        assert cache.frozen
        assert not cache.put(0, b"more")
        assert cache.preserve("again")
        assert os.path.samefile(Path(place, "again"), Path(place, "kept"))
        assert not cache.preserve("kept")
        assert cache.preserve("kept", overwrite=True)
    assert sorted(os.listdir(place)) == ["again", "kept"]


@pytest.mark.keeps("PFIO itself leaves a descriptor open")
@both
def test_files_go_both_ways(kind: Any, place: str) -> None:
    real = pytest.importorskip("pfio.cache")
    for theirs in (real.FileCache, real.MultiprocessFileCache):
        with filled(theirs(30, dir=place), 20) as cache:
            cache.preserve("theirs", overwrite=True)
        with kind(30, dir=place) as cache:
            assert cache.preload("theirs")
            assert content(cache) == [value(i) if i < 20 else None for i in range(30)]
        with filled(kind(30, dir=place), 20) as cache:
            assert cache.preserve("ours", overwrite=True)
        with theirs(30, dir=place) as cache:
            assert cache.preload("ours")
            assert content(cache) == [value(i) if i < 20 else None for i in range(30)]
    with filled(kind(30, dir=place)) as cache:
        assert cache.preserve("whole")
    with real.ReadOnlyFileCache(30, dir=place) as cache:
        assert cache.preload("whole")
        assert content(cache) == [value(i) for i in range(30)]


@both
def test_overwriting_is_one_step(kind: Any, place: str) -> None:
    with filled(kind(3, dir=place)) as old, kind(3, dir=place) as new, kind(3, dir=place) as reader:
        assert old.preserve("kept")
        assert reader.preload("kept")
        assert new.put(0, b"new")
        assert new.preserve("kept", overwrite=True)
        assert content(reader) == [value(i) for i in range(3)]  # goes on with what it opened
    with kind(3, dir=place) as reader:
        assert reader.preload("kept")
        assert content(reader) == [b"new", None, None]


@both
def test_without_a_dir_it_is_a_name_of_the_nodes_cache(kind: Any, home: Path) -> None:
    with filled(kind(30)) as cache:
        assert cache.preserve("kept")
        assert not cache.preserve("kept")
        assert cache.preserve("kept", overwrite=True)
        assert cache.preserve("twice")
        assert cache.frozen
    with forebay.Cache() as node, node.samples("kept", 30) as samples:
        assert samples.get(3) == value(3)
    for name in ("kept", "twice"):
        with kind(30) as cache, ReadOnlyFileCache(30) as reader:
            assert not cache.preload("none")
            with pytest.raises(FileNotFoundError, match="none"):
                reader.preload("none")
            assert cache.preload(name)
            assert reader.preload(name)
            assert cache.frozen
            assert not cache.put(0, b"more")
            assert content(cache) == content(reader) == [value(i) for i in range(30)]
    with kind(40) as cache, pytest.raises(ValueError, match="30 slots, but 40"):
        cache.preload("kept")


@pytest.mark.keeps("PFIO itself leaves a descriptor open")
@both
def test_without_a_dir_it_finds_what_the_real_one_kept(kind: Any) -> None:
    real = pytest.importorskip("pfio.cache")
    with filled(real.MultiprocessFileCache(5)) as cache:
        cache.preserve("old")
    with kind(5) as cache:
        assert cache.dir == real.file_cache._default_cache_path()
        assert cache.preload("old")
        assert content(cache) == [value(i) for i in range(5)]


def test_an_incomplete_file(place: str) -> None:
    with filled(FileCache(10, dir=place), 9) as cache:
        cache.preserve("kept")
    reader = ReadOnlyFileCache(10, dir=place)
    with pytest.raises(RuntimeError, match="slot 9"):
        reader.preload("kept")
    assert reader.closed
    for missing in (reader, ReadOnlyFileCache(10, dir=str(Path(place, "nowhere")))):
        with pytest.raises(FileNotFoundError, match="none") as caught:
            missing.preload("none")
        assert caught.value.filename == str(Path(missing.dir, "none"))
    with ReadOnlyFileCache(9, dir=place) as reader:  # so many are whole
        assert reader.preload("kept")
        assert not reader.closed
        assert content(reader) == [value(i) for i in range(9)]
        with pytest.raises(IndexError):
            reader.get(9)
        with pytest.raises(IndexError):
            reader.get(-1)
        for call in (lambda: reader.put(0, b""), lambda: reader.preserve("x")):
            with pytest.raises(io.UnsupportedOperation):
                call()
    assert reader.closed
    assert reader.get(0) is None
    path = Path(place, "kept")
    data = path.read_bytes()
    path.write_bytes(data[: sum(struct.unpack_from("Qq", data, 16 * 8)) - 1])
    with pytest.raises(RuntimeError):
        ReadOnlyFileCache(9, dir=place).preload("kept")
    with FileCache(10, dir=place) as cache:
        assert cache.preload("kept")
        assert content(cache) == [*(value(i) for i in range(8)), None, None]


def test_an_incomplete_array(home: Path) -> None:
    with filled(FileCache(10), 9) as cache:
        cache.preserve("kept")
    with pytest.raises(RuntimeError, match="slot 9"):
        ReadOnlyFileCache(10).preload("kept")


@both
def test_another_length_is_told(kind: Any, place: str) -> None:
    with filled(kind(10, dir=place)) as cache:
        cache.preserve("kept")
    with kind(11, dir=place) as cache, pytest.raises(ValueError, match="10 slots, but 11"):
        cache.preload("kept")
    with pytest.raises(ValueError, match="10 slots, but 11"):
        ReadOnlyFileCache(11, dir=place).preload("kept")


def preserved(place: str, sizes: list[int | None]) -> Path:
    """A file with slots of these sizes, some of more segments than one."""
    with MultiprocessFileCache(len(sizes), dir=place) as cache:
        order = [i for i, size in enumerate(sizes) if size is not None]
        random.Random(1).shuffle(order)
        half = len(order) // 2
        for i in order[:half]:
            assert cache.put(i, sized(i, sizes[i]))
        assert in_child(lambda: all(cache.put(i, sized(i, sizes[i])) for i in order[half:]))
        assert cache.preserve("kept")
    return Path(place, "kept")


def sized(i: int, size: int | None) -> bytes | None:
    return None if size is None else bytes([i % 251]) * size


@pytest.mark.parametrize(
    "sizes",
    [[None], [0, 0, 0], [7], [0, 1 << 20, 4096, 4095, 4097, None, 0], [*range(0, 3000, 7)]],
    ids=lambda sizes: f"{len(sizes)} of {sizes[-1]}",
)
@pytest.mark.parametrize("kernel", [True, False], ids=["in the kernel", "by hand"])
@pytest.mark.keeps("PFIO itself leaves a descriptor open")
def test_a_preserved_file_of_any_sizes(place: str, sizes: list[int | None], kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("pfio.cache")
    if not kernel:

        def refuse(*_: Any) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    path, wanted = preserved(place, sizes), [sized(i, size) for i, size in enumerate(sizes)]
    file = PfioFile(path)
    assert [None if (data := file.get(i)) is None else bytes(data) for i in range(len(file))] == wanted
    with real.FileCache(len(sizes), dir=place) as theirs, MultiprocessFileCache(len(sizes), dir=place) as ours:
        assert theirs.preload("kept")
        assert ours.preload("kept")
        assert content(theirs) == content(ours) == wanted


@pytest.mark.root
def test_where_blocks_can_be_shared_nothing_is_copied(tmp_path: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "xfs"
    place.mkdir()
    with open(image, "wb") as sparse:
        sparse.truncate(300 << 20)  # the smallest that xfs takes
    for command in (["/usr/sbin/mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, place]):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("mkfs.xfs is not there")
        if done.returncode:
            pytest.skip(f"no xfs can be mounted here: {done.stderr.strip()}")
    try:
        with MultiprocessFileCache(600, dir=place) as cache:
            assert all(cache.put(i, bytes([i % 251]) * 100_000) for i in range(600))
            os.sync()
            before = os.statvfs(place).f_bfree
            assert cache.preserve("kept")
            os.sync()
            assert (before - os.statvfs(place).f_bfree) * os.statvfs(place).f_bsize < 2 << 20
        with FileCache(600, dir=place) as cache:
            assert cache.preload("kept")
            assert content(cache) == [bytes([i % 251]) * 100_000 for i in range(600)]
    finally:
        subprocess.run(["umount", "-l", place], check=True)


# -- the entry in a directory ------------------------------------------------------------------------------------------


def leave(cache: Any) -> None:
    cache.close()


def drop(cache: Any) -> None:
    del cache
    gc.collect()


@both
@pytest.mark.parametrize("end", [leave, drop])
def test_a_cache_is_one_file_that_goes_with_it(kind: Any, place: str, end: Callable[[Any], None]) -> None:
    os.mkdir(place)
    Path(place, "mine").write_text("stays")
    cache = filled(kind(10, dir=place))
    assert len(os.listdir(place)) == 2
    reader = kind(10, dir=place)
    assert len(os.listdir(place)) == 3
    reader.close()
    assert content(cache)[9] == value(9)
    box = [cache]
    del cache
    end(box.pop())
    assert os.listdir(place) == ["mine"]


@both
def test_the_file_of_a_cache_goes_at_exit(kind: Any, place: str) -> None:
    code = f"""
import os
from forebay.adapters.pfio import {kind.__name__}
cache = {kind.__name__}(3, dir={place!r})
print(cache.put(0, b'x'), len(os.listdir(cache.dir)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 1\n", "")
    assert os.listdir(place) == []


@both
def test_what_a_killed_process_left_goes_with_the_next(kind: Any, place: str, children: ProcessGroup) -> None:
    reading, writing = os.pipe()

    def work() -> None:
        cache = filled(kind(10, dir=place))
        os.write(writing, b"x")
        signal.pause()
        cache.close()

    child = children(work)
    os.read(reading, 1)
    kind(10, dir=place).close()
    assert len(os.listdir(place)) == 1  # somebody has it open
    child.kill()
    Path(place, "forebay-mine").mkdir()
    Path(place, "forebay-0123456789abcdef").write_text("a file of the user's")
    with kind(10, dir=place) as cache:
        left = sorted(os.listdir(place))
        assert len(left) == 3
        assert filled(cache).get(3) == value(3)
    assert sorted(os.listdir(place)) == ["forebay-0123456789abcdef", "forebay-mine"]


def test_a_worker_that_outlives_the_maker_keeps_it(place: str) -> None:
    """Who is alive is told by locks: the maker is dead, a forked worker goes on."""
    ready, told = os.pipe(), os.pipe()

    def work(cache: Any) -> None:
        signal.alarm(60)
        os.close(told[1])
        os.write(ready[1], b"x")
        os.read(told[0], 1)
        good = cache.get(4) == value(4) and cache.put(7, b"seven") and cache.get(7) == b"seven"
        os.write(ready[1], b"y" if good else b"n")
        os._exit(0)

    maker = os.fork()
    if not maker:
        cache = filled(MultiprocessFileCache(10, dir=place), 5)
        if not os.fork():
            work(cache)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) == -signal.SIGKILL
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"
    MultiprocessFileCache(10, dir=place).close()
    assert len(os.listdir(place)) == 1
    os.write(told[1], b"x")
    assert os.read(ready[0], 1) == b"y"
    assert os.read(ready[0], 1) == b""
    deadline = time.monotonic() + 30
    while os.listdir(place):  # the pipe may be closed before the locks of the worker that ends
        assert time.monotonic() < deadline
        MultiprocessFileCache(10, dir=place).close()
    for fd in (ready[0], *told):
        os.close(fd)


@pytest.mark.parametrize("step", range(0, 60, 7))
def test_a_maker_killed_at_any_step_leaves_nothing_for_long(place: str, step: int) -> None:
    fork_to_die(step, lambda: FileCache(10, dir=place)).wait()
    FileCache(10, dir=place).close()
    assert os.listdir(place) == []


def test_a_root_that_is_removed_while_the_directory_is_looked_at_is_not_missed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = f"forebay-{7:016x}"
    assert base._ROOT.fullmatch(listed)
    with monkeypatch.context() as m:
        m.setattr(os, "listdir", lambda directory: [listed])
        assert base._abandoned_in(place) == []


def test_many_at_once_in_one_directory(place: str, children: ProcessGroup) -> None:
    def work() -> bool:
        for _ in range(4):
            with filled(FileCache(20, dir=place)) as cache:
                assert content(cache) == [value(i) for i in range(20)]
        return True

    assert all(child.result() for child in [children(work) for _ in range(6)])
    assert os.listdir(place) == []


@both
def test_a_network_file_system_is_refused(kind: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "fs_kind", lambda path: "nfs")
    for make in (kind, ReadOnlyFileCache):
        os.makedirs(place, exist_ok=True)
        with pytest.raises(ValueError, match="nfs"):
            make(10, dir=place)


@both
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_somebody_removes_it(kind: Any, place: str) -> None:
    with filled(kind(10, dir=place, cache_size_limit=10**6), 3) as cache:
        shutil.rmtree(place)
        assert content(cache)[3:] == [None] * 7
        assert set(content(cache)[:3]) <= {None, *map(value, range(3))}
        assert not cache.put(0, b"x")
        cache.put(5, b"x")
        assert cache.get(5) in (None, b"x")


# -- processes and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_forked_workers(given: bool, place: str, children: ProcessGroup) -> None:
    cache = MultiprocessFileCache(300, do_pickle=True, dir=place if given else None)

    def work(worker: int) -> list[Any]:
        for i in range(worker, 300, 3):
            assert cache.put(i, (i, value(i)))
        cache.close()  # of a worker: closes nothing
        return [cache.get(i) for i in range(worker, 300, 3)]

    done = [children(lambda w=w: work(w)) for w in range(3)]
    assert [child.result() for child in done] == [[(i, value(i)) for i in range(w, 300, 3)] for w in range(3)]
    assert content(cache) == [(i, value(i)) for i in range(300)]
    assert not in_child(lambda: cache.put(3, "again"))
    for call in (lambda: cache.preserve("x"), lambda: cache.preload("x")):
        assert in_child(lambda call=call: outcome(call)) is RuntimeError
    if given:
        assert len(os.listdir(place)) == 1
    cache.close()
    if given:
        assert os.listdir(place) == []


def spawned(cache: Any, first: int, queue: Any) -> None:
    for i in range(first, len(cache), 2):
        cache.put(i, value(i))
    with cache:
        queue.put((cache.get(first), outcome(lambda: cache.preserve("x")), cache.closed))


@pytest.mark.parametrize(("given", "method"), [(True, "spawn"), (False, "forkserver")])
def test_spawned_workers(given: bool, method: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BUDGET", "64MiB")  # of the node's cache: not of what lies in `dir`
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with MultiprocessFileCache(20, dir=place if given else None, cache_size_limit=10_000) as cache:
        workers = [context.Process(target=spawned, args=(cache, first, queue)) for first in range(2)]
        for worker in workers:
            worker.start()
        said = [queue.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
        assert sorted(said) == [(value(0), RuntimeError, False), (value(1), RuntimeError, False)]
        assert content(cache) == [value(i) for i in range(20)]
    if given:
        assert os.listdir(place) == []


def test_a_copy_in_the_same_process(place: str) -> None:
    with filled(MultiprocessFileCache(5, dir=place), 2) as cache:
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.put(3, b"three")
        assert cache.get(3) == b"three"
        del copy
        gc.collect()
        assert cache.get(0) == value(0)
        sent = pickle.dumps(cache)
        cache.preserve("kept")
    late = pickle.loads(sent)  # the maker has closed it meanwhile
    assert late.closed
    assert (late.get(0), late.put(0, b"x")) == (None, False)
    assert os.listdir(place) == ["kept"]
    with MultiprocessFileCache(5, dir=place) as cache:
        cache.preload("kept")
        copy = pickle.loads(pickle.dumps(cache))
        assert content(copy) == content(cache) == [value(0), value(1), None, b"three", None]
        assert copy.frozen
    reader = ReadOnlyFileCache(2, dir=place)
    reader.preload("kept")
    assert content(pickle.loads(pickle.dumps(reader))) == [value(0), value(1)]
    assert pickle.loads(pickle.dumps(ReadOnlyFileCache(2, dir=place))).get(0) is None


def test_a_file_cache_preloads_in_a_forked_process(place: str) -> None:
    for given in (place, None):
        with filled(FileCache(5, dir=given)) as cache:
            cache.preserve("kept")
        with FileCache(5, dir=given) as cache:
            assert in_child(lambda: cache.preload("kept") and content(cache)) == [value(i) for i in range(5)]
            assert in_child(lambda: (cache.close(), cache.closed, cache.get(0)))[1:] == (True, None)
            assert filled(cache).get(3) == value(3)


def test_a_file_cache_preserves_in_a_forked_process(place: str) -> None:
    """As PFIO's does; its other class refuses that."""
    for given in (place, None):
        with filled(FileCache(5, dir=given)) as cache:
            assert in_child(lambda: (cache.preserve("kept"), cache.preserve("kept"), cache.frozen)) == (True, False, True)
            assert cache.frozen
        with FileCache(5, dir=given) as cache:
            assert cache.preload("kept")
            assert in_child(lambda: cache.preserve("again"))
            assert content(cache) == [value(i) for i in range(5)]
        with MultiprocessFileCache(5, dir=given) as cache:
            with pytest.raises(RuntimeError, match="only in process"):
                in_child(lambda: cache.preserve("never"))
            assert cache.preload("again")
            assert content(cache) == [value(i) for i in range(5)]


def test_the_limit_is_one_for_all_processes(place: str, children: ProcessGroup) -> None:
    size, room = 100, 37
    cache = MultiprocessFileCache(200, dir=place, cache_size_limit=200 * 16 + size * room + 50)

    def work(worker: int) -> int:
        return sum(cache.put(i, bytes([i]) * size) for i in range(worker, 200, 4))

    assert sum(child.result() for child in [children(lambda w=w: work(w)) for w in range(4)]) == room
    assert cache.frozen
    assert not cache.put(199, b"")
    assert sum(data is not None for data in content(cache)) == room
    cache.close()


def test_a_fork_while_a_thread_puts_under_a_limit(place: str) -> None:
    with MultiprocessFileCache(3000, dir=place, cache_size_limit=10**9) as cache:
        stop = threading.Event()

        def put() -> None:
            for i in range(1500):
                cache.put(i, value(i))
                if stop.is_set():
                    return

        thread = threading.Thread(target=put)
        thread.start()
        for n in range(5):
            assert in_child(lambda n=n: cache.put(2000 + n, b"child"))
        stop.set()
        thread.join()
        assert [cache.get(2000 + n) for n in range(5)] == [b"child"] * 5


@pytest.mark.parametrize("kind", [*FILLED, NaiveCache])
def test_threads(kind: Any) -> None:
    cache = kind(400)
    won = [0] * 4

    def work(n: int) -> None:
        for i in range(400):
            won[n] += cache.put(i, bytes([n]) * 50)
            assert len(set(cache.get(i))) == 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 400
    cache.close()


def test_a_worker_that_ends_after_the_close_leaves_nothing(place: str, children: ProcessGroup) -> None:
    closed, ready = os.pipe(), os.pipe()
    cache = MultiprocessFileCache(2000, dir=place)

    def work() -> Any:
        assert cache.put(0, b"0")
        os.write(ready[1], b"x")
        os.read(closed[0], 1)
        return cache.get(0), [cache.put(i, bytes(100_000)) for i in range(1, 100)], cache.get(5)

    child = children(work)
    os.read(ready[0], 1)
    assert cache.put(1, b"1")
    cache.close()
    os.write(closed[1], b"x")
    first, puts, other = child.result()
    assert first in (b"0", None)
    assert not any(puts)
    assert other is None
    assert os.listdir(place) == []


# -- faults and words --------------------------------------------------------------------------------------------------


@both
def test_s13_a_full_disk(kind: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kind(10, dir=place) as cache:
        cache.put(0, b"before")

        def full(name: str, subject: str) -> None:
            if name in ("allocate", "pwritev"):
                raise OSError(28, "No space left on device")

        host.on_step(full)
        try:
            with pytest.warns(RuntimeWarning):
                kept = [cache.put(i, bytes([i]) * (1 << 20)) for i in range(1, 10)]
        finally:
            host.on_step(None)
        assert not kept[-1]
        assert content(cache) == [b"before", *(bytes([i]) * (1 << 20) if kept[i - 1] else None for i in range(1, 10))]
        assert not cache.frozen

        def no_room(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("forebay.adapters.pfio.base.write_array", no_room)
        with pytest.warns(RuntimeWarning, match="kept"):
            assert not cache.preserve("kept")
        assert all(name.startswith("forebay-") for name in os.listdir(place))


@pytest.mark.root
@both
def test_s13_a_small_tmpfs(kind: Any, place: str) -> None:
    os.mkdir(place)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "forebay-test", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        for _ in range(2):  # what was closed gave its room back
            with kind(600, dir=place) as cache:
                with pytest.warns(RuntimeWarning):
                    kept = [cache.put(i, bytes([i % 256]) * 100_000) for i in range(600)]
                assert 200 < sum(kept) < 400
                assert [i for i in range(600) if cache.get(i) == bytes([i % 256]) * 100_000] == [i for i in range(600) if kept[i]]
                with pytest.warns(RuntimeWarning):
                    assert not cache.preserve("kept")
            assert os.listdir(place) == []
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_naive() -> None:
    cache = NaiveCache(10, do_pickle=True)
    assert cache.put(-1, "last")
    assert cache.get(9) == cache.get(-1) == "last"
    assert not cache.put(9, "last")
    assert cache.put(0, None)
    assert cache.get(0) is None
    assert cache.put(0, cache)
    assert cache.get(0) is cache
    assert not cache.multiprocess_safe
    for i in (10, -11):
        with pytest.raises(IndexError):
            cache.get(i)
        with pytest.raises(IndexError):
            cache.put(i, b"")
    for length in (0, -1):
        with pytest.raises(ValueError, match="length"):
            NaiveCache(length)
    with NaiveCache(3, multithread_safe=True) as cache:
        assert cache.get_and_cache(1, lambda i: i * 2) == 2
        assert cache.get_and_cache(1, lambda i: i * 3) == 2
    assert pickle.loads(pickle.dumps(cache)).get(1) == 2


def test_every_class_is_a_cache() -> None:
    assert all(issubclass(kind, pfio.Cache) for kind in (*FILLED, ReadOnlyFileCache, NaiveCache))
    with pytest.raises(TypeError):
        pfio.Cache()  # type: ignore[abstract]


def test_verbose_says_it_in_the_log(place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forebay.pfio")
    with FileCache(3, dir=place, verbose=True) as cache:
        cache.preload("nothing")
    assert "created a cache of 3 slots" in caplog.text
    assert "nothing was preserved as nothing" in caplog.text
    caplog.clear()
    with FileCache(3, dir=place) as cache:
        cache.preload("nothing")
    assert caplog.text == ""


def test_trace_is_recorded_under_the_names_of_the_real_one(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def record(tag: str, trace: bool = False) -> Iterator[None]:
        seen.append((tag, trace))
        yield

    for name, module in (("pytorch_pfn_extras", ModuleType("x")), ("pytorch_pfn_extras.profiler", SimpleNamespace(record=record))):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    for kind, tag in ((FileCache, "file"), (MultiprocessFileCache, "multiprocessfile")):
        with kind(3, dir=place, trace=True) as cache:
            cache.put(0, b"x")
            assert cache.get(0) == b"x"
        assert seen == [(f"pfio.cache.{tag}:put", True), (f"pfio.cache.{tag}:get", True)]
        seen.clear()
        with kind(3, dir=place) as cache:
            cache.put(0, b"x")
        assert seen == []


@pytest.mark.parametrize("what", ["put", "create"])
def test_a_signal_ends_the_wait_for_a_lock_of_another_process(what: str, place: str) -> None:
    with FileCache(10, dir=place, cache_size_limit=10_000) as cache:
        fd = os.open(cache._index if what == "put" else place, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with interrupted("_locked" if what == "put" else "_creating_root", lambda: fcntl.flock(fd, fcntl.LOCK_UN)):
            cache.put(0, b"0") if what == "put" else FileCache(10, dir=place)
        os.close(fd)
        assert cache.put(1, b"1")
