"""Objects of URLs as a dataset of PyTorch, alone and behind an array of samples: a batch's misses come side by side, each once."""

from __future__ import annotations

import collections
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import Request, ScriptedServer
from tests.adapters.test_torch import raised_by
from tests.harness import MiB
from tests.processes import HANG, fork, in_child

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

from forebay.adapters.torch import CachedDataset, UrlDataset  # noqa: E402 - PyTorch may be missing

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")
OBJECTS = 24


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache


@pytest.fixture
def urls(server: ScriptedServer) -> list[str]:
    return put_objects(server)


def put_objects(server: ScriptedServer) -> list[str]:
    return [server.put(f"/{i:02}.txt", body(i)) for i in range(OBJECTS)]


def body(i: int) -> bytes:
    return f"object {i:02}".encode() * 1000


def number(url: str, data: memoryview) -> int:
    """The number of an object, whose bytes and URL agree."""
    i = int(url[-6:-4])
    assert (data.readonly, bytes(data)) == (True, body(i))
    return i


def listed(batch: list[Any]) -> list[Any]:
    return batch


def epoch(loader: Any) -> list[int]:
    return sorted(i for batch in loader for i in batch)


# -- loaders -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("forkserver", False), ("spawn", True)])
def test_s17_workers_fetch_each_object_once(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], method: str, persistent: bool
) -> None:  # fmt: skip
    multiprocessing.set_forkserver_preload([__name__])  # PyTorch is imported by the server, not by each worker
    dataset = UrlDataset(urls, number, cache=cache)
    loader = data.DataLoader(
        dataset, batch_size=5, shuffle=True, num_workers=2, collate_fn=listed, persistent_workers=persistent, multiprocessing_context=method
    )
    for _ in range(2):
        assert epoch(loader) == list(range(OBJECTS))
    assert (server.gets, server.sent) == (OBJECTS, sum(len(body(i)) for i in range(OBJECTS)))


def test_no_workers_and_the_same_dataset_in_forked_workers_afterwards(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str]
) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    first = data.Subset(dataset, range(OBJECTS // 2))
    assert epoch(data.DataLoader(first, batch_size=5, collate_fn=listed)) == list(range(OBJECTS // 2))
    assert [dataset[i] for i in range(3)] == [0, 1, 2]
    assert epoch(data.DataLoader(dataset, batch_size=5, num_workers=2, collate_fn=listed)) == list(range(OBJECTS))
    assert server.gets == OBJECTS


def test_ranks_of_a_distributed_sampler_read_all_objects(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset, seen = UrlDataset(urls, number, cache=cache), collections.Counter[int]()
    for rank in range(2):
        sampler = data.DistributedSampler(dataset, num_replicas=2, rank=rank)
        sampler.set_epoch(3)
        seen.update(epoch(data.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2, collate_fn=listed)))
    assert seen == collections.Counter(range(OBJECTS))
    assert server.gets == OBJECTS


def test_a_worker_that_is_killed_leaves_what_it_has_fetched(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], tmp_path: Path
) -> None:
    mark = tmp_path / "killed"

    def decode(url: str, data: memoryview) -> int:
        if url.endswith("12.txt") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number(url, data)

    loader = data.DataLoader(
        UrlDataset(urls, decode, cache=cache), batch_size=4, num_workers=2, collate_fn=listed, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        epoch(loader)
    fetched = {request.path for request in server.requests}
    assert "/12.txt" in fetched
    assert epoch(loader) == list(range(OBJECTS))
    again = collections.Counter(request.path for request in server.requests)
    assert again["/12.txt"] == 1  # its batch was fetched and stored before it was decoded
    assert again.keys() == {f"/{i:02}.txt" for i in range(OBJECTS)}


# -- batches -----------------------------------------------------------------------------------------------------------


class Together:
    """Holds up each request until as many are under way at the same time."""

    def __init__(self, server: ScriptedServer, count: int) -> None:
        self._barrier = threading.Barrier(count)
        server.on_request = self

    def __call__(self, request: Request) -> None:
        self._barrier.wait(HANG)


def test_the_misses_of_a_batch_are_fetched_side_by_side(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    assert dataset.__getitems__([3]) == [3]
    Together(server, 8)
    batch = [1, 2, 3, 4, 2, 5, 6, 7, 8, 0, 3]  # eight objects are missing
    assert dataset.__getitems__(batch) == batch
    assert server.gets == 9


def test_items_without_a_decoder_are_bytes(cache: forebay.Cache, urls: list[str]) -> None:
    dataset = UrlDataset(urls, cache=cache)
    assert dataset[2] == body(2)
    assert dataset.__getitems__([4, 2]) == [body(4), body(2)]
    assert all(type(item) is bytes for item in (dataset[2], *dataset.__getitems__([4])))
    (batch,) = data.DataLoader(data.Subset(dataset, [1, 2]), batch_size=2, num_workers=1)
    assert batch == [body(1), body(2)]


def test_a_decoder_may_return_what_it_was_given(cache: forebay.Cache, urls: list[str]) -> None:
    assert UrlDataset(urls, lambda url, data: data[:6], cache=cache).__getitems__([1, 2]) == [b"object"] * 2


def test_decoders_by_extension(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    other = server.put("/a.bin", b"12")
    dataset = UrlDataset([urls[7], other], {"txt": number, "bin": lambda url, data: int(bytes(data))}, cache=cache)
    assert dataset.__getitems__([1, 0]) == [12, 7]


@pytest.mark.parametrize("workers", [0, 1])
def test_s29_an_error_of_one_url_reaches_the_main_process(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], workers: int
) -> None:
    missing = f"{server.url}/missing.txt"
    loader = data.DataLoader(UrlDataset([*urls[:3], missing], number, cache=cache), batch_size=4, num_workers=workers)
    error = raised_by(loader)
    assert isinstance(error, errors.NotFound)
    assert "missing.txt" in str(error)


# -- URLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter], ids=["list", "tuple", "numpy", "iterator"])
def test_urls_of_any_kind(cache: forebay.Cache, urls: list[str], kind: Any) -> None:
    dataset = UrlDataset(kind(urls), number, cache=cache)
    assert len(dataset) == OBJECTS
    assert list(dataset.urls) == urls
    assert all(type(url) is str for url in dataset.urls)
    assert dataset.urls[-3:] == urls[-3:]
    assert dataset.__getitems__([np.int64(5), torch.tensor(6), 7]) == [5, 6, 7]
    for outside in (-1, OBJECTS):
        with pytest.raises(IndexError):
            dataset[outside]


@pytest.mark.parametrize(
    "texts", [[], ["/a"], ["/a", "/a"], ["/ü/1", "/ü/ß", "/ü/"], ["s3://b/x", "https://h/x"], ["", "/b"], ["/\udc80x", "/\udc80"]]
)
def test_packed_urls_are_those_that_were_given(cache: forebay.Cache, texts: list[str]) -> None:
    dataset = pickle.loads(pickle.dumps(UrlDataset(texts, cache=cache)))
    assert list(dataset.urls) == texts
    dataset.cache.close()


def test_paths_are_read_in_place(cache: forebay.Cache, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    assert UrlDataset([tmp_path / "a"], cache=cache)[0] == b"a"
    with pytest.raises(errors.ConfigError, match="a list"):
        UrlDataset(tmp_path / "a", cache=cache)  # type: ignore[arg-type]


def test_a_pickle_has_few_bytes_for_each_url(cache: forebay.Cache) -> None:
    count = 100_000
    dataset = UrlDataset([f"https://host.example/a/long/common/prefix/{i:08}.jpg" for i in range(count)], cache=cache)
    assert len(pickle.dumps(dataset)) < 21 * count


def test_the_arguments_of_a_cache_open_one(server: ScriptedServer, urls: list[str], tmp_path: Path) -> None:
    dataset = UrlDataset(urls, number, cache={"root": tmp_path / "root", "budget": 64 * MiB, "min_free": 0})
    sent = pickle.dumps(dataset)
    assert dataset[1] == 1
    assert in_child(lambda: pickle.loads(sent)[1]) == 1
    assert server.gets == 1
    dataset.cache.close()


# -- behind an array of samples ----------------------------------------------------------------------------------------


class Counted:
    """Decodes, and writes down what."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, url: str, data: memoryview) -> Any:
        with open(self._path, "ab", buffering=0) as file:
            file.write(f"{number(url, data)}\n".encode())
        return np.full(3, number(url, data))

    def take(self) -> dict[int, int]:
        lines = self._path.read_text().split() if self._path.exists() else []
        self._path.unlink(missing_ok=True)
        return collections.Counter(map(int, lines))


@pytest.fixture
def decode(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "decoded")


def cached(cache: forebay.Cache, urls: list[str], decode: Any) -> CachedDataset:
    return CachedDataset(UrlDataset(urls, decode, cache=cache), cache.samples("numbers", len(urls), codec="numpy"))


ONCE = dict.fromkeys(range(OBJECTS), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_s17_cached_items_are_fetched_and_decoded_once(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], decode: Counted, workers: int
) -> None:
    loader = data.DataLoader(cached(cache, urls, decode), batch_size=5, shuffle=True, num_workers=workers, collate_fn=listed)
    for expected in (ONCE, {}):
        assert sorted(int(item[0]) for batch in loader for item in batch) == list(range(OBJECTS))
        assert decode.take() == expected
    assert server.gets == OBJECTS


def test_the_misses_of_a_batch_of_cached_items_are_fetched_side_by_side(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], decode: Counted
) -> None:
    dataset = cached(cache, urls, decode)
    dataset.__getitems__([3])
    Together(server, 8)
    batch = [1, 2, 3, 4, 2, 5, 6, 7, 8, 0, 3]
    items = dataset.__getitems__(batch)
    assert [int(item[0]) for item in items] == batch
    assert len({id(item) for item in items}) == len(batch)
    assert decode.take() == dict.fromkeys(range(9), 1)
    assert sorted(dataset.samples) == list(range(9))


def test_overlapping_batches_of_two_processes_decode_each_item_once(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], decode: Counted
) -> None:
    dataset = cached(cache, urls, decode)
    both = threading.Barrier(2)
    server.on_request = lambda request: both.wait(HANG) if request.path in ("/00.txt", "/08.txt") else None  # both have begun
    other = fork(lambda: [int(item[0]) for item in dataset.__getitems__([0, 1, 2, 3, 4, 5, 6, 7])])
    while not server.gets:
        os.sched_yield()
    assert [int(item[0]) for item in dataset.__getitems__([8, 7, 6, 5, 4, 3, 2, 1])] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert other.result() == list(range(8))
    assert decode.take() == dict.fromkeys(range(9), 1)
    assert server.gets == 9


def test_an_error_of_one_item_of_a_batch_is_its_own(cache: forebay.Cache, server: ScriptedServer, urls: list[str], decode: Counted) -> None:
    urls[2] = f"{server.url}/missing.txt"
    dataset = cached(cache, urls, decode)
    with pytest.raises(errors.NotFound, match=r"missing\.txt"):
        dataset.__getitems__([0, 1, 2, 3])
    assert sorted(dataset.samples) == [0, 1]
    for outside in (-1, OBJECTS):
        with pytest.raises(IndexError):
            dataset.__getitems__([5, 6, outside])


def test_what_a_dataset_of_batches_raises_is_unchanged(cache: forebay.Cache) -> None:
    raised = errors.CacheFault("of another cache")

    class Broken(data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            raise raised

        def __getitems__(self, indices: list[int]) -> Any:
            raise raised

    dataset = CachedDataset(Broken(), cache.samples("broken", 4, codec="numpy"))
    with pytest.raises(errors.CacheFault) as found:
        dataset.__getitems__([1, 2])
    assert found.value is raised


def test_the_wrong_codec_is_named_for_a_batch(cache: forebay.Cache, urls: list[str]) -> None:
    dataset = CachedDataset(UrlDataset(urls, number, cache=cache), cache.samples("numbers", OBJECTS, codec="numpy"))
    with pytest.raises(errors.ConfigError, match="use codec='pytree'") as found:
        dataset.__getitems__([0, 1])
    assert "codec='pickle'" in str(found.value.__notes__)


def test_without_a_cache_a_batch_is_fetched_by_one_call_each_time(
    tmp_path: Path, server: ScriptedServer, urls: list[str], decode: Counted
) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        dataset = cached(cache, urls, decode)
        for _ in range(2):
            Together(server, 4)
            assert [int(item[0]) for item in dataset.__getitems__([1, 2, 3, 4])] == [1, 2, 3, 4]
            assert decode.take() == dict.fromkeys(range(1, 5), 1)


# -- with torchdata ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was(cache: forebay.Cache, urls: list[str], workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset = UrlDataset(urls, number, cache=cache)

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        sampler = data.RandomSampler(dataset, generator=generator)
        return stateful(dataset, batch_size=3, sampler=sampler, num_workers=workers, collate_fn=listed)

    whole = [i for batch in loader() for i in batch]
    first = loader()
    batches = iter(first)
    begun = [i for _ in range(3) for i in next(batches)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    again = loader()
    again.load_state_dict(state)
    assert begun + [i for batch in again for i in batch] == whole
