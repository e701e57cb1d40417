"""Shared memory of a claim: whole or not there at all, the same for all, and as long as a view lives."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import errors
from forebay._kernel import host
from forebay.claims import shared
from forebay.claims.members import Members
from tests.claims import contexts
from tests.claims.contexts import rank
from tests.processes import ProcessGroup, death_of, fork, fork_to_die, in_child

# -- what is shared ----------------------------------------------------------------------------------------------------


SHAPES = [((), ()), (5, (5,)), ([4, 1], (4, 1)), ((3, 0), (3, 0)), (np.int64(3), (3,)), (np.array([2, 2]), (2, 2))]
TYPES = ["u1", np.float64, ">i4", "M8[ns]", "U7", "S3", bool, [("a", "i2"), ("b", "f8", (2,))]]


@pytest.mark.parametrize(
    ("shape", "expected", "dtype"), [*((*shape, "f8") for shape in SHAPES), *(((2, 3), (2, 3), dtype) for dtype in TYPES)]
)
def test_an_array_is_zeros_and_shared(place: Path, context: Members, shape: Any, expected: tuple[int, ...], dtype: Any) -> None:
    ours, zeros = shared.array(context, "a", shape, dtype), np.zeros(expected, dtype)
    assert (ours.shape, ours.dtype) == (zeros.shape, zeros.dtype)
    assert ours.tobytes() == zeros.tobytes()
    assert ours.flags.writeable
    if ours.ndim and ours.size:
        ours.view("u1")[...] = 1
        assert in_child(lambda: rank(place, 1, lambda other: shared.array(other, "a", shape, dtype).tobytes())) == ours.tobytes()


@pytest.mark.parametrize(
    "dtype", [np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [8, 0], "itemsize": 24}), np.dtype("u1,f8", align=True)]
)
def test_types_with_gaps(place: Path, context: Members, dtype: Any) -> None:
    shared.array(context, "a", 3, dtype)
    assert in_child(lambda: rank(place, 1, lambda other: shared.array(other, "a", 3, dtype).dtype)) == dtype


def test_a_type_of_many_fields(place: Path, context: Members) -> None:
    dtype = [(f"field_{n:04}", "f8") for n in range(500)]
    shared.array(context, "a", 2, dtype)["field_0499"] = 7
    assert in_child(lambda: rank(place, 1, lambda other: shared.array(other, "a", 2, dtype)["field_0499"].tolist())) == [7, 7]


@pytest.mark.parametrize(("dtype", "value"), [("i8", -5), ("f4", 0.5), (bool, True), ("U3", "abc"), ([("x", "i4"), ("y", "i4")], (1, 2))])
def test_a_scalar(place: Path, context: Members, dtype: Any, value: Any) -> None:
    ours = shared.scalar(context, "s", dtype)
    assert ours.get() == np.zeros((), dtype).item()
    ours.set(value)
    assert in_child(lambda: rank(place, 1, lambda other: shared.scalar(other, "s", dtype).value)) == value
    ours.value = np.zeros((), dtype).item()
    assert ours.value == np.zeros((), dtype).item()
    assert "'s'" in repr(ours)


def test_a_buffer(place: Path, context: Members) -> None:
    ours = shared.buffer(context, "b", 10)
    assert (bytes(ours), ours.readonly, ours.format) == (bytes(10), False, "B")
    ours[3:6] = b"abc"
    assert in_child(lambda: rank(place, 1, lambda other: bytes(shared.buffer(other, "b", 10)))) == b"\0\0\0abc\0\0\0\0"


def test_an_empty_buffer(place: Path, context: Members) -> None:
    assert len(shared.buffer(context, "b", 0)) == 0
    assert in_child(lambda: rank(place, 1, lambda other: len(shared.buffer(other, "b", 0)))) == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "%2F", "ä" * 300, "x" * 300, "\ud800", "\0", "a\nb"])
def test_names_of_all_kinds(place: Path, context: Members, name: str) -> None:
    names = [name, f"{name}2", f"{name}/"]
    for value, each in enumerate(names, 1):
        shared.buffer(context, each, 1)[0] = value
    assert in_child(lambda: rank(place, 1, lambda other: [shared.buffer(other, each, 1)[0] for each in names])) == [1, 2, 3]
    assert [path for path in place.rglob("*") if path.parent != place] == []


# -- what is not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (("array", 3, "f8"), ("array", 4, "f8"), ("shape [3]", "shape [4]")),
        (("array", 3, "f8"), ("array", 3, "i8"), ("dtype('float64')", "dtype('int64')")),
        (("array", (2, 3), "f8"), ("array", (3, 2), "f8"), ("shape [2, 3]", "shape [3, 2]")),
        (("array", 1, "f8"), ("scalar", "f8"), ("array of", "scalar of")),
        (("scalar", "f8"), ("buffer", 8), ("scalar of", "buffer of 8 bytes")),
        (("buffer", 8), ("buffer", 9000), ("buffer of 8 bytes", "buffer of 9,000 bytes")),
        (("array", 2, [("a", "i4"), ("b", "i4")]), ("array", 2, [("a", "i4"), ("c", "i4")]), ("'b'", "'c'")),
    ],
)
def test_another_says_something_else(place: Path, context: Members, first: Any, then: Any, words: tuple[str, str]) -> None:
    getattr(shared, first[0])(context, "a", *first[1:])

    def other(context: Members) -> str:
        with pytest.raises(errors.ClaimMismatch) as caught:
            getattr(shared, then[0])(context, "a", *then[1:])
        assert isinstance(caught.value, RuntimeError)
        return str(caught.value)

    said = in_child(lambda: rank(place, 1, other))
    assert all(word in said for word in words), said


@pytest.mark.parametrize("dtype", [object, [("a", "i4"), ("b", object)], "U", "V0", "no type", np.dtypes.StringDType()])
def test_types_that_cannot_be_shared(context: Members, dtype: Any) -> None:
    with pytest.raises(errors.ConfigError, match="'a'"):
        shared.array(context, "a", 3, dtype)
    with pytest.raises(errors.ConfigError, match="'a'"):
        shared.scalar(context, "a", dtype)


@pytest.mark.parametrize("shape", [-1, (3, -2), 1.5, "3", True, None, (2, None), [[2, 3]]])
def test_shapes_that_make_no_sense(context: Members, shape: Any) -> None:
    with pytest.raises(errors.ConfigError, match="'a'"):
        shared.array(context, "a", shape, "f8")


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 2**63)])
def test_shapes_that_numpy_does_not_know(place: Path, context: Members, shape: Any) -> None:
    with pytest.raises(errors.ConfigError, match="'a'"):
        shared.array(context, "a", shape, "f8")
    assert not list(place.glob("memory.*"))


def test_a_scalar_is_one_value(context: Members) -> None:
    with pytest.raises(errors.ConfigError, match="not one value"):
        shared.scalar(context, "a", "(2,)i4")


@pytest.mark.parametrize("size", [-1, 1.5, "3", True, None])
def test_sizes_that_make_no_sense(context: Members, size: Any) -> None:
    with pytest.raises(errors.ConfigError, match="'a'"):
        shared.buffer(context, "a", size)


@pytest.mark.parametrize("suffix", [".new", "+new"])
def test_a_name_that_is_another_one_with_something_behind(context: Members, suffix: str) -> None:
    shared.buffer(context, f"a{suffix}", 1)[0] = 9
    shared.buffer(context, "a", 1)
    assert shared.buffer(context, f"a{suffix}", 1)[0] == 9


@pytest.mark.parametrize("name", [None, b"x", 3])
def test_names_that_are_none(context: Members, name: Any) -> None:
    with pytest.raises(errors.ConfigError, match="must be a str"):
        shared.buffer(context, name, 1)


def test_after_the_claim_was_left(place: Path, context: Members) -> None:
    def leave(other: Members) -> bytes:
        view = shared.buffer(other, "b", 4)
        other.leave()
        with pytest.raises(errors.Closed):
            shared.buffer(other, "b", 4)
        view[0] = 9
        return bytes(view)

    assert in_child(lambda: rank(place, 1, leave)) == b"\x09\0\0\0"
    assert shared.buffer(context, "b", 4)[0] == 9


# -- how long ----------------------------------------------------------------------------------------------------------


def test_a_view_outlives_the_files(place: Path, context: Members) -> None:
    array = shared.array(context, "a", 1000, "u4")
    part, cell = array[10:20], shared.scalar(context, "s", "i8")
    for path in place.glob("memory.*"):
        path.unlink()
    del array
    gc.collect()
    part[:] = 5
    cell.set(6)
    assert (part.tolist(), cell.get()) == ([5] * 10, 6)


def test_nothing_is_mapped_when_nobody_looks(place: Path, context: Members) -> None:
    def mapped() -> bool:
        return "memory.a" in Path("/proc/self/maps").read_text()

    array = shared.array(context, "a", 1000, "u4")
    assert mapped()
    del array
    gc.collect()
    assert not mapped()


def test_a_forked_child_has_it(context: Members, children: ProcessGroup) -> None:
    array, cell = shared.array(context, "a", 3, "i8"), shared.scalar(context, "s", "i8")

    def child() -> None:
        array[1] = 4
        cell.set(5)

    children(child).result()
    assert (array.tolist(), cell.get()) == ([0, 4, 0], 5)


def test_no_tracker_and_no_warning(place: Path, context: Members) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.claims import contexts; from forebay.claims import shared\n"
        f"context = contexts.join(Path({str(place)!r}), 1)\n"
        "a = shared.array(context, 'a', 10, 'i8'); a[:] = 3\n"
        "print('multiprocessing.resource_tracker' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    assert shared.array(context, "a", 10, "i8").tolist() == [3] * 10


def test_workers_that_are_spawned(place: Path, context: Members) -> None:
    array = shared.array(context, "a", 4, "i8")
    spawning = multiprocessing.get_context("spawn")
    workers = [spawning.Process(target=put, args=(place, number)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert array.tolist() == [0, 0, 10, 11]


def put(place: Path, number: int) -> None:
    shared.array(contexts.join(place, 0), "a", 4, "i8")[2 + number] = 10 + number


# -- making it ---------------------------------------------------------------------------------------------------------


def test_who_comes_at_once_gets_the_same(place: Path, context: Members, children: ProcessGroup) -> None:
    def add(other: Members) -> None:
        for number in range(20):
            cell = shared.array(other, f"a{number}", 3, "i8")
            with shared.NamedLock(other, "sum"):
                cell[2] += 1

    others = [children(lambda n=n: rank(place, n, add)) for n in range(1, 6)]
    for other in others:
        other.result()
    assert [shared.array(context, f"a{number}", 3, "i8")[2] for number in range(20)] == [5] * 20


def test_killed_at_every_step_of_making(quick_path: Path) -> None:
    for step in range(50):
        place = contexts.create(quick_path / str(step))
        context = contexts.leader(place)
        where = death_of(fork_to_die(step, lambda context=context: shared.array(context, "a", 1000, "f8")))
        array = shared.array(context, "a", 1000, "f8")
        assert not array.any(), where
        array[:] = 1
        assert in_child(lambda context=context: shared.array(context, "a", 1000, "f8").sum()) == 1000
        kept = [path for path in place.glob("memory.*") if path.name != "memory.a"]
        assert [path for path in kept if path.stat().st_ino != (place / "memory.a").stat().st_ino] == [], where
        shared.close(context)
        context.leave()
        if where is None:
            assert kept == []
            break
    assert step > 4


def test_memory_is_there_before_it_is_used(place: Path, context: Members) -> None:
    shared.buffer(context, "b", 3 << 20)
    found = (place / "memory.b").stat()
    assert found.st_blocks * 512 >= 3 << 20
    assert found.st_mode & 0o777 == 0o600


def test_more_than_there_is(context: Members) -> None:
    with pytest.raises(errors.NoSpace, match=r"bytes needed, .* are free .*FOREBAY_CLAIMS") as caught:
        shared.buffer(context, "b", 1 << 60)
    assert (caught.value.errno, caught.value.hopeless) == (errno.ENOSPC, True)
    assert caught.value.need > 1 << 60 > caught.value.budget >= caught.value.free


@pytest.mark.parametrize("step", ["create", "allocate"])
def test_shared_memory_that_fills_up_while_it_is_created_leaves_nothing(place: Path, context: Members, step: str) -> None:
    def full(call: str, subject: str) -> None:
        if call == step:
            raise OSError(errno.ENOSPC, "no space left on device")

    host.on_step(full)
    try:
        with pytest.raises(errors.NoSpace, match="bytes needed"):
            shared.buffer(context, "b", 1000)
    finally:
        host.on_step(None)
    assert list(place.glob("memory.*")) == []
    assert len(shared.buffer(context, "b", 1000)) == 1000


@pytest.mark.root
def test_a_full_file_system(tmp_path: Path) -> None:
    """A real one, of 4 MB, in a mount namespace of its own."""
    code = f"""
import os, subprocess, sys
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", {str(tmp_path)!r}], check=True)
from tests.claims import contexts
from forebay import errors
from forebay.claims import shared
context = contexts.leader(contexts.create(Path({str(tmp_path)!r}) / "claim"))
first = shared.buffer(context, "a", 2 << 20)
try:
    shared.buffer(context, "b", 3 << 20)
except errors.NoSpace as error:
    print("clear", error.free < 3 << 20)
with open({str(tmp_path / "others")!r}, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
first[:] = b"x" * (2 << 20)
print("stored", first[-1])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(["unshare", "-m", sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    assert (done.stdout.split(), done.returncode) == (["clear", "True", "stored", "120"], 0), done.stderr


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"forebay1" + b"\xff" * 8 + b"{}"])
def test_a_damaged_file(place: Path, context: Members, damage: bytes) -> None:
    (place / "memory.a").write_bytes(damage)
    with pytest.raises(errors.Damaged, match=r"memory\.a is damaged"):
        shared.buffer(context, "a", 8)


def test_a_file_cut_short_kills_nobody(place: Path, context: Members) -> None:
    shared.buffer(context, "a", 8000)
    os.truncate(place / "memory.a", 5000)
    with pytest.raises(errors.Damaged):
        shared.buffer(context, "a", 8000)


def test_a_symbolic_link_is_not_followed(place: Path, context: Members, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(bytes(10_000))
    (place / "memory.a").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        shared.buffer(context, "a", 8)


def test_without_numpy(place: Path, context: Members) -> None:
    def bare() -> str:
        sys.modules["numpy"] = None  # type: ignore[assignment]
        with pytest.raises(errors.MissingExtra) as caught:
            shared.array(context, "a", 3, "i8")
        assert len(shared.buffer(context, "b", 3)) == 3
        return str(caught.value)

    assert "numpy" in fork(bare).result()


def test_a_link_in_the_place_of_a_claims_directory_is_not_followed(context: Members, tmp_path: Path) -> None:
    """Whoever owns the registry can put one there: nothing is made where it leads."""
    theirs = tmp_path / "home"
    theirs.mkdir()
    kept = context.directory.with_name("kept")
    context.directory.rename(kept)
    context.directory.symlink_to(theirs)
    try:
        with pytest.raises(errors.ForebayError):
            shared.array(context, "new", 3, "int64")
        assert list(theirs.iterdir()) == []
    finally:
        context.directory.unlink()
        kept.rename(context.directory)
    assert len(shared.array(context, "new", 3, "int64")) == 3
