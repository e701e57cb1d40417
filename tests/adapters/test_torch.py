"""A dataset of PyTorch behind an array of samples: whatever starts the workers, however many ranks, each item is decoded once."""

from __future__ import annotations

import collections
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from tests.harness import KiB, MiB
from tests.interrupts.every_line import Moments, interrupt
from tests.processes import Gate, ProcessGroup, in_child

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

from forebay.adapters import torch as adapter  # noqa: E402 - PyTorch may be missing
from forebay.adapters.torch import CachedDataset  # noqa: E402 - PyTorch may be missing

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
ITEMS = 48


class Log:
    """A file to which any process adds lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: object) -> None:
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def take(self) -> collections.Counter[str]:
        """What was added since the last time, and how often."""
        lines = self.path.read_text().split() if self.path.exists() else []
        self.path.write_text("")
        return collections.Counter(lines)


class Pictures(data.Dataset):  # type: ignore[misc]
    """Item i: an image, its tensor and its label. Each decoding is written down."""

    def __init__(self, log: Log, length: int = ITEMS, side: int = 32) -> None:
        self.log, self.length, self.side = log, length, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Any, Any, int]:
        self.log.add(i)
        return image(i, self.side), torch.from_numpy(image(i, 4)).float(), i


class Failing(Pictures):
    def __getitem__(self, i: int) -> Any:
        if i == 5:
            raise LookupError("picture 5 cannot be read", i)
        return super().__getitem__(i)


class OfThree(Exception):
    """An error that nobody can make of a message alone."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__(a, b, c)


class Brightened:
    """A transform that changes with each call: what it gave must not be kept."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, item: tuple[Any, Any, int]) -> tuple[Any, Any, int]:
        picture, tensor, label = item
        self.log.add(label)
        return picture + np.uint8(1), tensor.add_(0.5), label


def image(i: int, side: int) -> Any:
    return np.frombuffer(bytearray(random.Random(i).randbytes(side * side * 3)), np.uint8).reshape(side, side, 3)


def listed(batch: list[Any]) -> list[Any]:
    return batch


def assert_epoch(loader: Any, length: int = ITEMS, brighter: bool = False) -> None:
    """All items of an epoch, byte for byte."""
    seen = []
    for batch in loader:
        for picture, tensor, label in batch:
            side = picture.shape[0]
            assert np.array_equal(picture, image(label, side) + np.uint8(brighter))
            assert torch.equal(tensor, torch.from_numpy(image(label, 4)).float() + 0.5 * brighter)
            seen.append(label)
    assert sorted(seen) == list(range(length))


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> Iterator[None]:
    """What PyTorch consists of is not looked through after each test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "decoded")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache


def cached(cache: forebay.Cache, dataset: Any, name: str | None = "pictures", transform: Any = None, **how: Any) -> CachedDataset:
    return CachedDataset(dataset, cache.samples(name, len(dataset), codec="pickle", **how), transform)


ONCE = collections.Counter(map(str, range(ITEMS)))
THRICE = collections.Counter({str(i): 3 for i in range(ITEMS)})


# -- loaders -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_s17_workers_decode_each_item_once(cache: forebay.Cache, tmp_path: Path, log: Log, method: str) -> None:
    multiprocessing.set_forkserver_preload([__name__])  # PyTorch is imported by the server, not by eight workers
    transformed = Log(tmp_path / "transformed")
    dataset = cached(cache, Pictures(log), transform=Brightened(transformed))
    loader = data.DataLoader(
        dataset, batch_size=5, shuffle=True, num_workers=8, collate_fn=listed, persistent_workers=True, multiprocessing_context=method
    )
    for _ in range(3):
        assert_epoch(loader, brighter=True)
    assert log.take() == ONCE
    assert transformed.take() == THRICE
    del loader
    assert_epoch([[item] for item in data.DataLoader(dataset, batch_size=None, collate_fn=listed)], brighter=True)
    assert log.take() == {}
    assert dataset.samples.verify() == []


def test_no_workers(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log))
    for _ in range(2):
        assert_epoch(data.DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=listed))
    assert log.take() == ONCE


def test_batches_as_pytorch_makes_them(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log), copy=True)
    for _ in range(2):
        for pictures, tensors, labels in data.DataLoader(data.Subset(dataset, range(8, 40)), batch_size=8, num_workers=2):
            assert pictures.shape == (8, 32, 32, 3)
            assert tensors.dtype == torch.float32
            for picture, label in zip(pictures, labels.tolist(), strict=True):
                assert np.array_equal(picture, image(label, 32))
    assert log.take() == collections.Counter(map(str, range(8, 40)))


def test_the_next_job_decodes_nothing(tmp_path: Path, log: Log) -> None:
    for expected in (ONCE, {}):
        with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
            assert_epoch(data.DataLoader(cached(cache, Pictures(log)), batch_size=6, num_workers=2, collate_fn=listed))
        assert log.take() == expected


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_s17_eight_ranks_at_once(tmp_path: Path, log: Log, children: ProcessGroup) -> None:
    gates = [Gate() for _ in range(8)]

    def rank(number: int) -> None:
        with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
            dataset = cached(cache, Pictures(log))
            gates[number].wait()
            for _ in range(2):
                assert_epoch(data.DataLoader(dataset, batch_size=7, shuffle=number % 2 == 1, collate_fn=listed))

    ranks = [children(lambda n=n: rank(n)) for n in range(8)]
    for gate in gates:
        gate.open()
    for child in ranks:
        child.result()
    for gate in gates:
        gate.close()
    assert log.take() == ONCE


RANK = """
import sys
from pathlib import Path
import forebay
from torch.utils.data import DataLoader, DistributedSampler
from tests.adapters.test_torch import Log, Pictures, assert_epoch, cached, listed

root, file, rank = sys.argv[1:]
with forebay.Cache(root, budget="64MiB") as cache:
    dataset = cached(cache, Pictures(Log(Path(file))))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=int(rank))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, collate_fn=listed, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        print(sum(len(batch) for batch in loader))
    assert_epoch(DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=listed))
"""


@pytest.mark.rotates
def test_s17_two_ranks_with_workers(tmp_path: Path, log: Log) -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-c", RANK, str(tmp_path / "root"), str(log.path)]
    place = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place) for n in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=100)
        assert (rank.returncode, out.split(), err) == (0, ["24"] * 3, "")
    assert log.take() == ONCE


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["sequential", "shuffled"])
def test_s16_a_dataset_larger_than_the_budget(tmp_path: Path, log: Log, shuffle: bool, workers: int) -> None:
    side = 185  # 103 KB an image
    size = len(pickle.dumps(Pictures(log, 1, side)[0]))
    with forebay.Cache(tmp_path / "root", budget=80 * size, min_free=0) as cache:
        dataset = cached(cache, Pictures(log, 100, side))
        log.take()
        loader = data.DataLoader(dataset, batch_size=5, shuffle=shuffle, num_workers=workers, collate_fn=listed)
        assert_epoch(loader, 100)
        assert sum(log.take().values()) == 100
        for _ in range(2):
            stored = {str(i) for i in dataset.samples}
            assert len(stored) >= 60
            assert_epoch(loader, 100)
            assert log.take() == collections.Counter({str(i) for i in range(100)} - stored)


def test_nothing_is_kept_with_a_cache_that_is_off(log: Log, tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        dataset = cached(cache, Pictures(log))
        for _ in range(2):
            assert_epoch(data.DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=listed))
            assert log.take() == ONCE


# -- errors ------------------------------------------------------------------------------------------------------------


def raised_by(loader: Any) -> BaseException:
    """Without its traceback, which would hold the iterator: PyTorch then takes 10 seconds to end its workers."""
    try:
        collections.deque(loader, 0)
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("workers", [0, 2])
def test_s29_what_the_dataset_raises_reaches_the_main_process(cache: forebay.Cache, log: Log, workers: int) -> None:
    loader = data.DataLoader(cached(cache, Failing(log)), batch_size=4, num_workers=workers, collate_fn=listed)
    began = time.monotonic()
    error = raised_by(loader)
    assert time.monotonic() - began < 30
    assert type(error) is LookupError
    assert "picture 5 cannot be read" in str(error)
    assert workers or error.args == ("picture 5 cannot be read", 5)


def test_s29_errors_of_the_library_reach_the_main_process(cache: forebay.Cache, tmp_path: Path) -> None:
    class Files(Pictures):
        def __getitem__(self, i: int) -> Any:
            return cache.read(tmp_path / f"{i}.png")

    loader = data.DataLoader(cached(cache, Files(Log(tmp_path / "no"))), num_workers=2, multiprocessing_context="fork")
    error = raised_by(loader)
    assert isinstance(error, errors.NotFound)
    assert "0.png" in str(error)


MADE: list[Callable[[], Exception]] = [
    lambda: OSError(5, "a bad disk", "x.png"),
    lambda: errors.CacheFault("of another cache"),
    lambda: errors.WaitTimeout("of another cache"),
    lambda: OfThree(1, 2, 3),
    lambda: TypeError("as a codec raises it"),
]


@pytest.mark.parametrize("make", MADE)
def test_what_the_dataset_raises_is_unchanged(cache: forebay.Cache, log: Log, make: Callable[[], Exception]) -> None:
    raised = make()

    class Broken(Pictures):
        def __getitem__(self, i: int) -> Any:
            self.log.add(i)
            raise raised

    dataset = cached(cache, Broken(log))
    for ask in (lambda: dataset[3], lambda: dataset.__getitems__([3, 4])):
        with pytest.raises(type(raised)) as found:
            ask()
        assert found.value is raised
        assert found.value.__context__ is None
    assert dataset.samples.filled == 0
    assert log.take()["3"] == 2


def test_what_fails_in_another_rank_fails_here_with_its_own_error(cache: forebay.Cache, log: Log, children: ProcessGroup) -> None:
    begun, go, here = Gate(), Gate(), os.getpid()

    class Broken(Pictures):
        def __getitem__(self, i: int) -> Any:
            begun.open()
            if os.getpid() != here:
                go.wait()
            raise OfThree(os.getpid(), 2, i)

    dataset, found = cached(cache, Broken(log)), []

    def ask() -> None:
        try:
            dataset[7]
        except OfThree as error:
            found.append(error.args)

    children(ask)
    begun.wait()
    waiting = threading.Thread(target=ask)
    waiting.start()
    while not cache.stats().waits:
        time.sleep(0.01)
    go.open()  # the one that has it fails; the one that waited is told, and tries for itself
    waiting.join()
    assert found == [(here, 2, 7)]
    for gate in (begun, go):
        gate.close()


def test_a_codec_that_fails_does_not_stop_the_loop(cache: forebay.Cache, log: Log, caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def encode(self, value: Any) -> bytes:
            return pickle.dumps(value)

        def decode(self, payload: memoryview) -> Any:
            raise ZeroDivisionError("no number of mine")

    dataset = CachedDataset(Pictures(log), cache.samples("odd", ITEMS, codec=Odd()))
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(2):
            assert_epoch(data.DataLoader(dataset, batch_size=5, collate_fn=listed))
            assert log.take() == ONCE
    assert [r.levelname for r in caplog.records if r.name == "forebay.adapters.torch"] == ["WARNING"]
    assert "no number of mine" in caplog.text
    caplog.clear()  # tracebacks hold what was seen in them


@pytest.mark.parametrize("whole", [False, True], ids=["an item", "a batch"])
def test_what_a_handler_raises_is_no_fault_of_the_cache(cache: forebay.Cache, caplog: pytest.LogCaptureFixture, whole: bool) -> None:
    """At any line: not even once the item is decoded."""
    before, moments, at = signal.signal(signal.SIGUSR1, interrupt), Moments(), 0
    gc.disable()  # what a handler raises as a finalizer begins is lost
    try:
        while moments.where or at < 8:
            at += 7
            dataset = cached(cache, Batches(), name=f"{at}")
            call = partial(dataset.__getitems__, [0, 1]) if whole else partial(dataset.__getitem__, 0)
            assert moments.run(call, at) == bool(moments.where), moments.where
            assert call() == ([b"0", b"1"] if whole else b"0")
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, before)
    assert not caplog.records


class Batches(data.Dataset):  # type: ignore[misc]
    """Items, several at once."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> bytes:
        return b"%d" % i

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        return [self[i] for i in indices]


@pytest.mark.keeps("the root was removed under an open cache")
def test_a_root_that_is_removed_does_not_stop_the_loop(tmp_path: Path, log: Log) -> None:
    def job() -> None:
        with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
            dataset = cached(cache, Pictures(log))
            loader = data.DataLoader(dataset, batch_size=5, collate_fn=listed, num_workers=2)
            assert [dataset[i][2] for i in range(ITEMS // 2)] == list(range(ITEMS // 2))
            os.rename(tmp_path / "root", tmp_path / "elsewhere")
            for _ in range(2):
                assert_epoch(loader)

    in_child(job)
    assert set(log.take()) == set(ONCE)


def test_items_that_cannot_be_pickled(cache: forebay.Cache, log: Log) -> None:
    class Functions(Pictures):
        def __getitem__(self, i: int) -> Any:
            self.log.add(i)
            return i, threading.Lock()

    dataset = cached(cache, Functions(log))
    with pytest.warns(RuntimeWarning, match="cannot be stored") as told:
        assert [item[0] for _ in range(2) for item in dataset.__getitems__(range(4))] == [0, 1, 2, 3] * 2
    assert len(told) == 1


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("codec", "why"), [("raw", "tuple is not bytes-like"), ("numpy", "stores one numpy.ndarray"), ("json", "is a tuple")]
)
def test_the_wrong_codec_is_named(cache: forebay.Cache, log: Log, codec: str, why: str) -> None:
    dataset = CachedDataset(Pictures(log), cache.samples(codec, ITEMS, codec=codec))
    for take in (lambda: dataset[0], lambda: dataset.__getitems__([0, 1]), lambda: next(iter(data.DataLoader(dataset, num_workers=1)))):
        with pytest.raises(errors.ConfigError, match=f"{why}.*use codec='pytree'"):
            take()
    assert "codec='pickle'" in str(_raised(lambda: dataset[0]).__notes__)


def _raised(call: Any) -> Any:
    with pytest.raises(errors.ConfigError) as found:
        call()
    return found.value


def test_items_without_pickle(cache: forebay.Cache, log: Log) -> None:
    dataset = CachedDataset(
        Pictures(log), cache.samples("tree", ITEMS, codec="pytree"), transform=Brightened(Log(log.path.with_name("other")))
    )
    for workers in (0, 2):
        assert_epoch(data.DataLoader(dataset, batch_size=7, num_workers=workers, collate_fn=listed), brighter=True)
    assert log.take() == ONCE


# -- items -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [None, bytes])
def test_bytes_are_bytes(cache: forebay.Cache, transform: Any) -> None:
    bodies = [os.urandom(1000) for _ in range(8)]
    dataset = CachedDataset(bodies, cache.samples("bytes", 8), transform)
    for _ in range(2):
        loader = data.DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=listed, timeout=60)
        assert [item for batch in loader for item in batch] == bodies
        assert dataset[3] == bodies[3]
    assert len(dataset.samples.get(3)) == 1000


def test_items_that_are_none_are_kept(cache: forebay.Cache, log: Log) -> None:
    class Nothing(Pictures):
        def __getitem__(self, i: int) -> Any:
            self.log.add(i)

    dataset = cached(cache, Nothing(log))
    assert dataset.__getitems__([0, 1]) == [None, None]
    assert dataset.__getitems__([1, 0]) == [None, None]
    assert dataset[0] is None
    assert log.take() == {"0": 1, "1": 1}


def test_numbers_of_other_packages_are_indices(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log))
    for i in (np.int64(3), torch.tensor(3), 3):
        assert dataset[i][2] == 3
        assert dataset.__getitems__([i])[0][2] == 3
    assert log.take() == {"3": 1}


def test_an_item_that_is_drawn_twice_is_two_objects(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log), transform=Brightened(Log(log.path.with_name("transformed"))))
    for _ in range(2):
        for _, tensor, label in dataset.__getitems__([3, 3, 4, 3]):
            assert torch.equal(tensor, torch.from_numpy(image(label, 4)).float() + 0.5)
    assert log.take() == {"3": 1, "4": 1}


@pytest.mark.parametrize("index", [-1, ITEMS, 1 << 70])
def test_an_index_outside_is_an_error(cache: forebay.Cache, log: Log, index: int) -> None:
    dataset = cached(cache, Pictures(log))
    for ask in (lambda: dataset[index], lambda: dataset.__getitems__([0, index])):
        with pytest.raises(IndexError):
            ask()
    assert [item[2] for item in dataset] == list(range(ITEMS))


def test_items_may_be_written_to(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log))
    for _ in range(2):
        picture, tensor, _ = dataset[1]
        picture[:] = 0
        tensor.zero_()
    assert np.array_equal(dataset[1][0], image(1, 32))
    assert torch.equal(dataset[1][1], torch.from_numpy(image(1, 4)).float())
    assert log.take() == {"1": 1}


@pytest.mark.parametrize("size", [1_000, 2_000_000])
@pytest.mark.parametrize("codec", ["numpy", "pytree"])
def test_pytorch_warns_of_nothing(cache: forebay.Cache, codec: str, size: int) -> None:
    """Its collate function has tensors share the memory of arrays, and warns where that cannot be written to."""
    arrays = [np.full(size, number, np.uint8) for number in range(4)]
    samples = cache.samples("arrays", 4, codec=codec)
    dataset = CachedDataset(arrays, samples)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            (batch,) = data.DataLoader(dataset, batch_size=4)
            assert [int(row.sum()) for row in batch] == [size * number for number in range(4)]
            batch[:] = 9
    assert [int(samples.get(number)[0]) for number in range(4)] == [0, 1, 2, 3]  # type: ignore[index]


def test_counters_come_from_workers(cache: forebay.Cache, log: Log) -> None:
    loader = data.DataLoader(cached(cache, Pictures(log)), batch_size=8, num_workers=2, collate_fn=listed)
    assert_epoch(loader)
    before = cache.stats()
    assert (before.hits, before.misses) == (0, ITEMS)
    assert before.bytes_stored > ITEMS * 3 * KiB
    assert_epoch(loader)
    after = cache.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (ITEMS, 0)
    assert after.bytes_hit - before.bytes_hit == before.bytes_stored


# -- handles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pictures", None])
def test_s17_it_pickles(cache: forebay.Cache, log: Log, name: str | None) -> None:
    dataset = cached(cache, Pictures(log), name, transform=listed)
    assert dataset[3][2] == 3
    sent = pickle.dumps(dataset)

    def arrive() -> tuple[int, int, bool]:
        again = pickle.loads(sent)
        again[4]
        return len(again), again[3][2], again.transform is listed

    assert in_child(arrive) == (ITEMS, 3, True)
    assert dataset[4][2] == 4
    assert log.take() == {"3": 1, "4": 1}


def test_what_is_no_array_of_samples_is_refused(cache: forebay.Cache, log: Log) -> None:
    for wrong in (None, cache, {}, "pictures"):
        with pytest.raises(errors.ConfigError, match=r"cache\.samples\("):
            CachedDataset(Pictures(log), wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="48 items, but the array of samples 50 slots"):
        CachedDataset(Pictures(log), cache.samples(length=50, codec="pickle"))
    closed = cache.samples(length=ITEMS)
    closed.close()
    with pytest.raises(errors.Closed):
        CachedDataset(Pictures(log), closed)


@pytest.mark.parametrize("length", [None, 5])
def test_a_stream_is_refused(cache: forebay.Cache, length: int | None) -> None:
    class Stream(data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(())

        if length:

            def __len__(self) -> int:
                return 5

    for wrong in (Stream(), iter(())):
        with pytest.raises(errors.ConfigError, match="map-style"):
            CachedDataset(wrong, cache.samples(length=5))


def test_after_close_it_says_so(cache: forebay.Cache, log: Log) -> None:
    dataset = cached(cache, Pictures(log))
    dataset.samples.close()
    asks: list[Callable[[], Any]] = [lambda: dataset[0], lambda: dataset.__getitems__([0])]
    for ask in asks:
        with pytest.raises(errors.Closed):
            ask()


def test_without_pytorch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import forebay\n"
        "try: import forebay.adapters.torch\n"
        "except forebay.errors.MissingExtra as error: print(error.extra, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("torch "), done.stderr
    assert "the extra 'torch'" in done.stdout


# -- tensors over what the cache gives ---------------------------------------------------------------------------------

WRITES = """
import sys, warnings
warnings.simplefilter("error")
import torch, forebay
from forebay.adapters.torch import tensor
with forebay.Cache(sys.argv[1]) as cache:
    view = cache.get("large") if sys.argv[2] == "get" else cache.read(sys.argv[2])
    before = bytes(view)
    mine, other = tensor(view), tensor(view[3:], dtype=torch.uint8, offset=1, count=5)
    assert bytes(mine) == before and bytes(other) == before[4:9]
    mine.add_(1)
    other.fill_(7)
    assert bytes(view) == before and bytes(cache.get("large") or b"") == before
    assert mine[0] == (before[0] + 1) % 256
    del view, cache
    mine.fill_(9)
    print(mine.sum().item())
"""


@pytest.mark.rotates
def test_a_tensor_may_be_written_to_and_nobody_else_sees_it(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(300_001)
    (tmp_path / "source").write_bytes(data)
    with forebay.Cache(tmp_path / "root", budget="1GB") as cache:
        cache.put("large", data)
        seen = cache.get("large")
        for door in ("get", str(tmp_path / "source")):
            words = [sys.executable, "-c", WRITES, str(tmp_path / "root"), door]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stdout.strip()) == (0, str(9 * len(data))), (door, done.stderr)
        assert seen is not None
        assert bytes(seen) == data
        assert (tmp_path / "source").read_bytes() == data
        assert cache.check(deep=True) == []


def test_a_tensor_is_no_copy_until_it_is_written_to(tmp_path: Path) -> None:
    size = 64 << 20
    with forebay.Cache(tmp_path / "root", budget="256MB") as cache:
        cache.put("large", bytes(size))
        view = cache.get("large")
        assert view is not None
        before = private_bytes()
        made = adapter.tensor(view, torch.float32, offset=4096)
        assert made.shape == (size // 4 - 1024,)
        assert private_bytes() - before < size // 4
        made[::1024] = 1.0
        assert private_bytes() - before > size // 2
        assert view[4096:8192] == bytes(4096)
        del made
        assert private_bytes() - before < size // 4


def private_bytes() -> int:
    """What this process has of its own."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_Dirty"))


def test_a_tensor_outlives_what_it_was_made_of(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget="1GB") as cache:
        cache.put("large", b"x" * 100_000)
        view = cache.get("large")
        made = adapter.tensor(view)
        assert cache.evict("values:large").removed
        late = adapter.tensor(view)  # the file is gone: a copy
        del view
        cache.put("large", b"y" * 100_000)
    for each in (made, late):
        each[0] = 1
        assert bytes(each) == b"\1" + b"x" * 99_999
    assert bytes(pickle.loads(pickle.dumps(made))) == bytes(made)


@pytest.mark.parametrize(
    "buffer", [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"-a-b-c-d")[1::2], np.frombuffer(b"abcd", "u1")]
)
def test_a_tensor_of_any_buffer_is_its_own(buffer: Any) -> None:
    made = adapter.tensor(buffer)
    made[0] = 0
    assert bytes(made) == b"\0bcd"
    assert bytes(memoryview(buffer)) == b"abcd"


def test_a_tensor_of_a_small_value_and_of_nothing(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget="1GB") as cache:
        cache.put("small", b"abcd")
        cache.put("empty", b"")
        made = adapter.tensor(cache.get("small"))
        made.zero_()
        assert cache.get("small") == b"abcd"
        assert adapter.tensor(cache.get("empty")).shape == (0,)
    with pytest.raises(TypeError):
        adapter.tensor("text")
    with pytest.raises(ValueError, match="offset"):
        adapter.tensor(b"abcd", offset=9)


class Image:
    """What PIL's images are to NumPy."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (2, 3), "typestr": "|u1", "version": 3, "data": self._data}


def test_a_tensor_of_what_numpy_takes_for_an_array() -> None:
    image = Image(b"abcdef")
    made = adapter.tensor(image)
    assert (made.dtype, made.tolist()) == (torch.uint8, [[97, 98, 99], [100, 101, 102]])
    made.zero_()
    assert bytes(np.asarray(image)) == b"abcdef"
    assert adapter.tensor(image, torch.uint8, offset=4).tolist() == [101, 102]


def test_a_tensor_of_an_array_has_its_type_and_shape(tmp_path: Path) -> None:
    wanted = np.arange(60_000, dtype=np.float32).reshape(200, 300)
    with forebay.Cache(tmp_path / "root", budget="1GB") as cache:
        cache.put("array", wanted.tobytes())
        array = np.frombuffer(cache.get("array"), np.float32).reshape(200, 300)
        made = adapter.tensor(array[50:150])
        assert (made.dtype, made.shape) == (torch.float32, (100, 300))
        made += 1
        np.testing.assert_array_equal(array, wanted)
        np.testing.assert_array_equal(made.numpy(), wanted[50:150] + 1)
        np.testing.assert_array_equal(adapter.tensor(array[:, ::2]).numpy(), wanted[:, ::2])
