"""Handles of arrays whose root, or its catalog, is deleted, moved or replaced while they are open."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine import spaces
from forebay._engine.packs.pack import Pack
from forebay.samples import NoPack
from tests.harness import MiB
from tests.processes import Line, in_child, talk_to

OLD, NEW, LENGTH = b"old" * 1000, b"new" * 1000, 100


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def cache(place: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(place, budget=64 * MiB, min_free=0) as cache:
        yield cache
        assert [problem for problem in cache.check() if problem.kind != "stray"] == []


def opened(place: Path) -> forebay.Cache:
    return forebay.Cache(place, budget=64 * MiB, min_free=0)


def by_another(place: Path, work: Callable[[forebay.Samples[Any]], Any], name: str = "a", codec: str = "raw") -> Any:
    """What another process gets from the array of this name."""

    def run() -> Any:
        with opened(place) as cache, cache.samples(name, LENGTH, codec=codec) as samples:
            return work(samples)

    return in_child(run)


def delete(place: Path) -> None:
    shutil.rmtree(place)


def move(place: Path) -> None:
    place.rename(place.with_name("aside"))


def replace(place: Path) -> None:
    """Put another root in the place."""
    spare = place.with_name("spare")

    def make() -> None:
        with opened(spare) as cache:
            cache.put("there", b"before")

    in_child(make)
    move(place)
    spare.rename(place)


def copy(place: Path) -> None:
    """Put a copy of the root in the place: it has the same id, and files of the same names."""
    move(place)
    shutil.copytree(place.with_name("aside"), place)


def delete_catalog(place: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        (place / f"catalog.sqlite{ending}").unlink(missing_ok=True)


def delete_array(place: Path) -> None:
    for array in (place / "packs").iterdir():
        shutil.rmtree(array)


LOSSES = [delete, move, replace, delete_catalog]


def lose(cache: forebay.Cache, how: Callable[[Path], None]) -> None:
    """Lose the root, and let this process notice."""
    how(cache.path)
    cache.put("x", b"1" * 30_000)
    assert cache.get("x") is not None


# -- a root whose loss the process has noticed ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "pickle"])
@pytest.mark.parametrize("how", LOSSES)
def test_a_handle_uses_the_array_of_the_present_root(cache: forebay.Cache, how: Callable[[Path], None], codec: str) -> None:
    samples: Any = cache.samples("a", LENGTH, codec=codec, quota="8MB")
    samples.put(1, OLD)
    get = samples.get
    assert get(1) == OLD
    lose(cache, how)
    assert by_another(cache.path, lambda other: (other.get(1), other.put(1, NEW)), codec=codec) == (None, True)
    assert samples.get(1) == get(1) == NEW
    assert samples.get(2) is None
    assert samples.put(3, b"three")
    assert samples.get(3) == b"three"
    assert by_another(cache.path, lambda other: bytes(other.get(3)), codec=codec) == b"three"
    assert samples._pack.quota == 8_000_000
    assert by_another(cache.path, lambda other: other.put(4, b"four"), codec=codec)
    assert samples.get(4) == get(4) == b"four"


def filled_of(pickled: bytes) -> int:
    found: int = pickle.loads(pickled).filled
    return found


USES: dict[str, Callable[[forebay.Samples[Any]], object]] = {
    "get": lambda samples: samples.get(1) is None,
    "get, copied": lambda samples: samples.get(1, copy=True) is None,
    "get_many": lambda samples: samples.get_many([1, 2]) == [None, None],
    "get_or_put": lambda samples: samples.get_or_put(1, lambda: NEW) == NEW == samples.get(1),
    "get_or_put_many": lambda samples: samples.get_or_put_many([1, 2], lambda missing: [NEW for _ in missing]) == [NEW, NEW],
    "put": lambda samples: samples.put(1, NEW) and samples.get(1) == NEW,
    "in": lambda samples: 1 not in samples,
    "iter": lambda samples: list(samples) == [],
    "filled": lambda samples: samples.filled == 0,
    "repr": lambda samples: "0 filled" in repr(samples),
    "frozen": lambda samples: not samples.frozen,
    "freeze": lambda samples: (samples.freeze(), samples.frozen, samples.put(1, NEW))[1:] == (True, False),
    "verify": lambda samples: samples.verify() == [],
    "with": lambda samples: samples.__enter__().filled == 0,
    "writable": lambda samples: samples.writable().get(1) is None,
    "a pickle": lambda samples: in_child(functools.partial(filled_of, pickle.dumps(samples))) == 0,
    "close": lambda samples: (samples.close(), samples.closed)[1],
}


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("use", USES)
def test_each_call_finds_the_present_array(cache: forebay.Cache, use: str, name: str | None) -> None:
    samples: Any = cache.samples(name, LENGTH, codec="pickle")
    samples.put(1, OLD)
    samples.get(1)
    lose(cache, delete)
    assert len(samples) == LENGTH
    assert not samples.closed
    assert USES[use](samples)
    samples.close()
    assert samples.closed
    with pytest.raises(forebay.errors.Closed):
        samples.get(1)


@pytest.mark.parametrize("how", [delete, move, replace])
def test_a_reader_notices_by_a_sample_of_another_process_that_is_gone(cache: forebay.Cache, how: Callable[[Path], None]) -> None:
    """Its slot is filled in the index that this process has mapped, so nothing is put there."""
    samples = cache.samples("a", LENGTH)
    by_another(cache.path, lambda other: (other.put(1, OLD), other.put(2, OLD)))
    assert samples.filled == 2
    how(cache.path)
    assert samples.get(1) is None
    assert samples.put(1, NEW)
    assert samples.get(1) == NEW
    assert samples.get_or_put(2, lambda: NEW) == NEW
    assert by_another(cache.path, lambda other: other.filled) == 2


def test_a_put_notices_while_the_job_closes_its_descriptors(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    appender = samples._pack._appender
    os.close(appender.fd)
    pack, make_ready = samples._pack, appender.make_ready
    appended = iter([lambda: make_ready(1 << 20), lambda: lose(cache, delete)])

    def append(*_: Any) -> None:
        next(appended)()
        raise forebay.errors.CacheFault("the array is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_append_locked", append)
        assert samples.put(2, NEW)
    assert by_another(cache.path, lambda other: bytes(other.get(2))) == NEW


def test_handles_of_one_array_stay_together(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH, codec="pickle")
    writable = samples.writable()
    samples.put(1, OLD)
    lose(cache, delete)
    assert samples.put(1, NEW)
    assert writable.get(1) == NEW
    assert writable._pack is samples._pack
    writable.close()
    assert samples.closed


def test_an_array_gets_its_name_in_the_present_root(cache: forebay.Cache) -> None:
    samples = cache.samples(length=LENGTH)
    samples.put(1, OLD)
    lose(cache, delete)
    samples.put(2, NEW)
    assert samples.preserve("a")
    assert by_another(cache.path, lambda other: (other.frozen, list(other), bytes(other.get(2)))) == (True, [2], NEW)
    lose(cache, delete)
    assert samples.get(2) is None
    assert samples.frozen
    assert by_another(cache.path, lambda other: other.put(2, NEW))
    other = cache.samples(length=LENGTH)
    assert other.preload("a")
    assert other.get(2) == NEW
    lose(cache, delete)
    assert other.get(2) is None
    assert not other.put(2, NEW)


def test_each_loss_counts(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    get = samples.get
    for turn in range(4):
        assert samples.get(1) is get(1) is None
        assert samples.put(1, b"%d" % turn)
        assert samples.get(1) == get(1) == b"%d" % turn
        lose(cache, delete)
    del samples
    assert get(1) is None
    assert by_another(cache.path, lambda other: other.put(1, NEW))
    assert get(1) == NEW


def test_what_another_shape_has_the_name_of_is_not_found(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    assert samples.get(1) == OLD
    lose(cache, delete)

    def take_the_name() -> None:
        with opened(cache.path) as other:
            other.samples("a", LENGTH + 1).put(1, NEW)

    in_child(take_the_name)
    assert samples.get(1) is None
    assert not samples.put(1, OLD)


def test_another_cache_of_the_process_notices(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    assert samples.get(1) == OLD
    delete(cache.path)
    with opened(cache.path) as other:
        assert samples.get(1) is None
        assert samples.put(1, NEW)
        assert other.samples("a", LENGTH).get(1) == NEW


def test_a_thread_that_reads_gets_the_old_sample_or_the_new_one(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH, codec="pickle")
    raised, stop = list[BaseException](), threading.Event()

    def read(own: forebay.Samples[Any]) -> None:
        try:
            while not stop.is_set():
                assert own.get(1) in (None, OLD)
                assert own.get_or_put(1, lambda: OLD) == OLD
                own.put(2, NEW)
                assert own.get(2) in (None, NEW)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=read, args=(own,)) for own in (samples, samples, samples.writable())]
    for thread in threads:
        thread.start()
    for _ in range(3):
        lose(cache, move)  # in one step: who recovers the root meanwhile would find parts of it
        shutil.rmtree(cache.path.with_name("aside"))
        samples.get_or_put(1, lambda: OLD)
    stop.set()
    for thread in threads:
        thread.join()
    assert raised == []
    assert by_another(cache.path, lambda other: other.get(1), codec="pickle") == OLD


def test_of_two_threads_that_replace_an_array_one_does(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 opens the present array / T2 opens it, and puts / T1 goes on with the one of T2."""
    samples = cache.samples(length=LENGTH)
    samples.put(1, OLD)
    lose(cache, delete)
    handles: Any = samples._handles
    replacement = type(handles).replacement

    def put_before(self: Any, lost: Pack) -> Any:
        made = replacement(self, lost)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: samples.put(1, NEW))
            thread.start()
            thread.join()
        return made

    monkeypatch.setattr(type(handles), "replacement", put_before)
    assert samples.get(1) == NEW
    assert samples.filled == 1
    monkeypatch.undo()


def test_a_handle_that_is_closed_stays_so(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 opens the present array / T2 closes the handle / T1 would give it the array."""
    samples = cache.samples("a", LENGTH)
    lose(cache, delete)
    handles: Any = samples._handles
    take_up, found = type(handles).take_up, list[Any]()

    def close_before(self: Any, pack: Pack) -> None:
        found.append(pack)
        samples.close()
        take_up(self, pack)

    monkeypatch.setattr(type(handles), "take_up", close_before)
    with pytest.raises(forebay.errors.Closed):
        samples.put(1, NEW)
    assert samples.closed
    assert [pack.closed for pack in found] == [True]
    monkeypatch.undo()


def test_no_bytes_of_the_present_array_stand_for_those_of_the_lost_one(cache: forebay.Cache) -> None:
    """T1 reads a sample / T2 recovers the root / T1 maps the sample to be written to, which is in the lost array only."""
    samples = cache.samples("a", LENGTH, codec="pickle")
    samples.put(1, OLD)
    data = samples._pack.peek(1)
    assert data is not None
    lose(cache, delete)
    samples.put(1, NEW)
    assert samples.get(1) == NEW
    assert samples._private(1, data) == data


# -- a loss that the process has not noticed ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", [delete, move, replace, delete_array])
def test_no_sample_that_is_put_is_lost_with_a_root(cache: forebay.Cache, how: Callable[[Path], None]) -> None:
    """P1 puts a sample / P2 deletes the root, and puts one / P1 puts another one: it is in the root that is there, and P1 reads that of
    P2."""
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    assert samples.get(1) == OLD

    def other(line: Line) -> None:
        line.hear()
        how(cache.path)
        with opened(cache.path) as own, own.samples("a", LENGTH) as array:
            line.say(array.put(1, NEW))
            line.say((line.hear(), bytes(array.get(3) or b""))[1])

    with talk_to(other) as child:
        child.say()
        assert child.hear()
        assert samples.put(3, b"three")
        child.say()
        assert child.hear() == b"three"
    assert samples.get(1) == NEW
    assert samples.get(3) == b"three"


def test_a_copy_of_the_root_gets_what_is_put(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    copy(cache.path)
    assert samples.put(2, b"two" * MiB)
    assert samples.put(3, b"three")
    assert by_another(cache.path, lambda other: (bytes(other.get(1)), bytes(other.get(3)))) == (OLD, b"three")


def test_a_forked_child_puts_into_the_present_root(cache: forebay.Cache) -> None:
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)

    def put(line: Line) -> None:
        samples.put(2, OLD)
        line.say(bytes(samples.get(1) or b""))
        line.hear()
        line.say(samples.put(3, b"three"))

    with talk_to(put) as child:
        assert child.hear() == OLD
        lose(cache, delete)
        child.say()
        assert child.hear()
        assert samples.get(3) == b"three"


def test_a_root_that_nobody_may_make_again(cache: forebay.Cache) -> None:
    """The samples are made, and not stored; nothing raises. Later the root can be made, and they are."""
    samples = cache.samples("a", LENGTH)
    samples.put(1, OLD)
    delete(cache.path)
    cache.path.write_bytes(b"a file")
    with warnings.catch_warnings(record=True):
        assert not samples.put(2, NEW)
        assert samples.get_or_put(3, lambda: NEW) == NEW
    cache.path.unlink()
    lose(cache, lambda _: None)
    assert samples.get(1) is None
    assert samples.put(1, NEW)


# -- a root that goes while an array is opened -------------------------------------------------------------------------


@pytest.mark.parametrize("how", [delete, move, replace])
def test_an_array_whose_root_goes_while_it_is_opened(
    cache: forebay.Cache, how: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1 leases an array / P2 moves the root away / T1 opens the array's index."""
    with cache.samples("a", LENGTH) as samples:
        samples.put(1, OLD)
    lost, leases = list[bool](), list[Any]()

    def lose_before(*arguments: Any) -> Pack:
        if not lost:
            lost.append(True)
            leases.append(arguments[4])
            how(cache.path)
        return Pack(*arguments)

    monkeypatch.setattr(spaces, "Pack", lose_before)
    with cache.samples("a", LENGTH) as samples:
        assert lost
        assert samples.get_or_put(1, lambda: NEW) == NEW
    monkeypatch.undo()
    assert [lease.closed for lease in leases] == [True]
    assert by_another(cache.path, lambda other: bytes(other.get(1))) == NEW


def test_a_new_array_whose_root_goes_while_it_is_opened(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = list[bool]()

    def lose_before(*arguments: Any) -> Pack:
        if not lost:
            lost.append(True)
            move(cache.path)
        return Pack(*arguments)

    monkeypatch.setattr(spaces, "Pack", lose_before)
    with cache.samples("a", LENGTH) as samples:
        assert lost
        assert samples.put(1, NEW)
    monkeypatch.undo()
    assert by_another(cache.path, lambda other: bytes(other.get(1))) == NEW


def test_an_array_is_marked_whose_root_goes_before_it_is_listed(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 opens an array / T2 recovers the root / T1 lists the array among those that a recovery marks."""
    with cache.samples("a", LENGTH) as samples:
        samples.put(1, OLD)
    lost = list[bool]()

    def lose_after(*arguments: Any) -> Pack:
        pack = Pack(*arguments)
        if not lost:
            lost.append(True)
            thread = threading.Thread(target=lambda: lose(cache, delete))
            thread.start()
            thread.join()
        return pack

    monkeypatch.setattr(spaces, "Pack", lose_after)
    samples = cache.samples("a", LENGTH)
    monkeypatch.undo()
    assert lost
    assert samples.get(1) is None
    assert samples.put(1, NEW)
    assert by_another(cache.path, lambda other: bytes(other.get(1))) == NEW


def test_a_read_only_handle_goes_on_with_what_it_has(cache: forebay.Cache) -> None:
    with cache.samples("a", LENGTH) as samples:
        samples.put(1, OLD)
    with forebay.Cache(cache.path, read_only=True) as reader, reader.samples("a", LENGTH) as found:
        assert found.get(1) == OLD
        lose(cache, delete)
        assert os.path.exists(cache.path)
        assert found.get(1) == OLD
        assert not found.put(2, NEW)


def test_an_array_that_is_opened_while_its_handle_is_closed_stays_closed() -> None:
    """T1 opens the array / T2 closes the handle, which has none yet / T1 gives the handle the array."""

    class Opened:
        closed = False

        def close(self) -> None:
            self.closed = True

    opened = Opened()

    def find() -> Any:
        late.close()
        return opened

    late = NoPack(10, find_pack=find)
    late._open()
    assert opened.closed
