"""Shared memory with the calls of Streaming: what it gives, whom it can meet, and what is left of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from forebay import claims, errors  # noqa: E402
from forebay._kernel import host  # noqa: E402
from forebay.adapters.streaming import clean_stale_shared_memory  # noqa: E402
from forebay.adapters.streaming.shared import SharedArray, SharedMemory, SharedScalar  # noqa: E402

SHM = Path("/dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    """A name of shared memory that nobody has."""
    name = f"forebay-test-{secrets.token_hex(6)}"
    yield name
    for left in SHM.glob(f"*{name}*"):
        left.unlink()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which must say nothing on its standard error."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done


def test_three_ways_to_get_a_piece(name: str) -> None:
    with pytest.raises(FileNotFoundError):
        SharedMemory(name, False)
    made = SharedMemory(name, True, 100)
    assert len(made.buf) == made.shm.size == 100
    assert bytes(made.buf) == bytes(100)
    made.buf[:3] = b"abc"
    with pytest.raises(FileExistsError):
        SharedMemory(name, True, 100)
    opened, either = SharedMemory(name, False), SharedMemory(name, None, 5)
    assert bytes(opened.buf[:3]) == bytes(either.buf[:3]) == b"abc"
    assert len(either.buf) == 100
    assert [len(made.created_shms), len(opened.created_shms), len(either.created_shms)] == [1, 0, 0]
    assert [len(made.opened_shms), len(opened.opened_shms), len(either.opened_shms)] == [0, 1, 1]
    opened.cleanup()
    assert (SHM / name).exists()
    made.cleanup()
    made.cleanup()
    assert not (SHM / name).exists()


@pytest.mark.parametrize("create", [True, None])
def test_a_new_piece_needs_a_size(name: str, create: bool | None) -> None:
    with pytest.raises(ValueError, match="size"):
        SharedMemory(name, create)
    with pytest.raises(ValueError, match="name"):
        SharedMemory(None, False)
    unnamed = SharedMemory(create=create, size=8)
    assert (SHM / unnamed.shm.name).stat().st_mode & 0o777 == 0o600
    unnamed.cleanup()


@pytest.mark.parametrize("wrong", ["a/b", "/", "", "x" * 256, "a\0b"])
def test_what_is_no_name(wrong: str) -> None:
    with pytest.raises(FileNotFoundError):
        SharedMemory(wrong, True, 8)


def test_a_name_is_a_text() -> None:
    with pytest.raises(TypeError, match="5 is not a name"):
        SharedMemory(5, True, 8)  # type: ignore[arg-type]


def test_create_is_true_or_false_and_anything_else_is_either(name: str) -> None:
    made = SharedMemory(name, 1, np.int64(8))  # type: ignore[arg-type]
    assert (made.shm.size, len(made.created_shms)) == (8, 1)
    for create in (0, 1, None):
        assert len(SharedMemory(name, create, 8).opened_shms) == 1  # type: ignore[arg-type]
    made.cleanup()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_memory_of_another_user_cannot_be_opened(name: str) -> None:
    made = SharedMemory(name, True, 8)
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            SharedMemory(name, None, 8)
        except PermissionError:
            os._exit(13)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    made.cleanup()


def test_a_link_is_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    (SHM / name).symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        SharedMemory(name, None, 8)
    assert (tmp_path / "target").read_bytes() == b"untouched"


def test_whoever_opens_it_finds_a_whole_one(name: str) -> None:
    """Many come at once, again and again: none sees a piece that has no size yet, and just one has made it."""
    for _ in range(50):
        gate = threading.Barrier(4)

        def come(_: int, gate: threading.Barrier = gate) -> SharedMemory:
            gate.wait()
            return SharedMemory(name, None, 4096, auto_cleanup=False)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(come, range(4)))
        assert sum(len(memory.created_shms) for memory in found) == 1
        assert {len(memory.buf) for memory in found} == {4096}
        for memory in found:
            memory.cleanup()


def test_a_maker_that_is_killed_leaves_nothing(name: str) -> None:
    if (child := os.fork()) == 0:
        host.on_step(lambda call, _: os.kill(os.getpid(), signal.SIGKILL) if call == "allocate" else None)
        SharedMemory(name, True, 4096)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not [there for there in os.listdir(SHM) if name in there]


def test_a_full_memory_is_an_error_where_it_is_made(name: str) -> None:
    with pytest.raises(errors.NoSpace, match=r"no room in /dev/shm for .* bytes needed, .* free"):
        SharedMemory(name, True, 1 << 45)
    assert not (SHM / name).exists()


def test_what_was_made_of_it_outlives_it(name: str) -> None:
    memory = SharedMemory(name, True, 80)
    numbers = np.ndarray(10, buffer=memory.buf, dtype=np.int64)
    numbers[:] = range(10)
    memory.cleanup()
    assert memory.buf is None  # as Streaming's
    del memory
    assert numbers.tolist() == list(range(10))


def test_who_took_the_name_since_keeps_it(name: str) -> None:
    memory = SharedMemory(name, True, 8)
    (SHM / name).unlink()
    other = SharedMemory(name, True, 8)
    memory.cleanup()
    assert (SHM / name).exists()
    other.cleanup()


END = """
import os, sys
from forebay.adapters.streaming.shared import SharedMemory
memory = SharedMemory(sys.argv[1], True, 8, auto_cleanup=sys.argv[2] == "clean")
opened = SharedMemory(sys.argv[1], False)
if (child := os.fork()) == 0:
    sys.exit()  # runs what is registered for the end
os.waitpid(child, 0)
print(os.path.exists("/dev/shm/" + sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["clean", "keep"])
def test_the_end_of_the_maker_takes_the_name_away(name: str, how: str) -> None:
    assert run(END, name, how).stdout == "True\n"
    assert not (SHM / name).exists()


USE = """
import os, sys, threading
from forebay.adapters.streaming import SharedArray, SharedMemory, World, get_shm_prefix
name, what = sys.argv[1:]
if what == "of a number":
    prefix, memory = get_shm_prefix(["/data/a"], [None], World(1, 1, 1, 0))
    name = f"{prefix:06}_{name}"
    array = SharedArray(8, "u1", name)
else:
    array = SharedMemory(name, None, 8, auto_cleanup=what != "kept")
array.numpy()[0] if what == "of a number" else array.buf[0]
print(name, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def user(name: str, what: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that uses a block until it is told to end, and the block's file."""
    with subprocess.Popen([sys.executable, "-c", USE, name, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, SHM / process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["ended", "killed"])
@pytest.mark.parametrize("what", ["kept", "of a number", "cleaned up"])
@pytest.mark.parametrize("registry", ["in memory", "elsewhere"])
def test_a_block_goes_with_its_last_process(
    name: str, what: str, how: str, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = SHM / f"{name}-claims" if registry == "in memory" else tmp_path / "claims"
    monkeypatch.setenv("FOREBAY_CLAIMS", str(place))
    with user(name, what) as (maker, path):
        first = SharedMemory(path.name, False)
        first.buf[0] = 7
        end = maker.kill if how == "killed" else lambda: maker.communicate("\n")
        end()
        assert maker.wait() == (-signal.SIGKILL if how == "killed" else 0)
        claims.prune_claims()
        assert path.exists() is (what != "cleaned up" or how == "killed")  # this process has it
        if path.exists():
            assert SharedMemory(path.name, None, 8).buf[0] == 7
        with user(path.name, "kept") as (last, same):
            assert same == path
            first.cleanup()
            SharedMemory(path.name, False).cleanup()
            assert path.exists()
            last.kill()
            last.wait()
        new = SharedMemory(path.name, True, 8)  # what the killed process left is no obstacle
        assert new.buf[0] == 0
        new.cleanup()
    assert not path.exists()
    assert claims.list_claims() == []
    shutil.rmtree(place)


def test_cleaning_removes_what_killed_processes_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    with user(name, "kept") as (maker, path):
        clean_stale_shared_memory()
        assert path.exists()
        maker.kill()
        maker.wait()
        clean_stale_shared_memory()
        assert not path.exists()


def _make(name: str) -> None:
    SharedMemory(name, True, 8)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_end_of_a_child_of_multiprocessing(name: str, method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=_make, args=(name,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not (SHM / name).exists()


def test_the_tracker_of_multiprocessing_is_left_alone(name: str) -> None:
    before = resource_tracker.register, resource_tracker.unregister
    SharedMemory(name, True, 8).cleanup()
    assert (resource_tracker.register, resource_tracker.unregister) == before


def test_pickled_it_is_the_same_memory(name: str) -> None:
    array = SharedArray((2, 3), np.int32, name)
    again = pickle.loads(pickle.dumps(array))
    again[1] = 7
    assert array.numpy().tolist() == [[0, 0, 0], [7, 7, 7]]
    assert (again.shape, again.dtype, again.name, len(again)) == ((2, 3), np.int32, name, 2)
    array.shm.cleanup()


def test_an_array_that_cannot_be(name: str) -> None:
    for shape in (-1, (-2, -3)):
        with pytest.raises(ValueError, match="negative dimensions are not allowed"):
            SharedArray(shape, np.int32, name)
    with pytest.raises(TypeError, match="objects cannot be shared"):
        SharedArray(2, object, name)
    assert not (SHM / name).exists()


def test_an_array_that_was_cleaned_up_is_not_one_of_this_process_alone(name: str) -> None:
    array = SharedArray(2, np.int32, name)
    array.shm.cleanup()
    with pytest.raises(ValueError, match="cleaned up"):
        array[0] = 1


def test_array_and_scalar(name: str) -> None:
    array = SharedArray(np.int64(4), np.uint8, name)
    assert (array.shape, array.dtype, len(array)) == ((4,), np.uint8, 4)
    array[:] = [1, 2, 3, 4]
    array[np.array([0, 2])] = 9
    assert SharedArray(4, np.uint8, name)[1:].tolist() == [2, 9, 4]
    with pytest.raises(TypeError, match="small"):
        SharedArray(100, np.int64, name).numpy()
    array.shm.cleanup()
    scalar = SharedScalar(np.float64, name)
    assert scalar.get() == 0
    SharedScalar(np.float64, name).set(2.5)
    assert scalar.get() == 2.5
    scalar.arr.shm.cleanup()


def test_pythons_own_can_be_met(name: str) -> None:
    """Jobs with Streaming as it is share the node."""
    from multiprocessing.shared_memory import SharedMemory as Plain

    made = SharedMemory(name, True, 100)
    made.buf[:2] = b"hi"
    plain = Plain(name, False)
    assert (plain.size, bytes(plain.buf[:2])) == (100, b"hi")
    plain.close()
    plain.unlink()
    plain = Plain(name, True, 10)
    assert SharedMemory(name, None, 10).shm.size == 10
    plain.close()
    plain.unlink()
