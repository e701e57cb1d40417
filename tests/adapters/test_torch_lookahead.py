"""A sampler of PyTorch that has objects fetched before a worker asks for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests.adapters.test_torch import raised_by
from tests.adapters.test_torch_urls import OBJECTS, listed, number, put_objects
from tests.items import until
from tests.scenarios.test_look_ahead import Objects
from tests.scenarios.test_prefetch import brim
from tests.servers.nginx import nginx

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

from forebay.adapters.torch import Lookahead, UrlDataset  # noqa: E402 - PyTorch may be missing

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


@pytest.fixture
def urls(server: ScriptedServer) -> list[str]:
    return put_objects(server)


@pytest.mark.rotates
@pytest.mark.parametrize("batched", [False, True], ids=["sampler", "batch sampler"])
@pytest.mark.parametrize(("method", "workers"), [(None, 0), ("fork", 2), ("spawn", 2)])
def test_s17_it_yields_what_the_sampler_does_and_each_object_is_fetched_once(
    cache: forebay.Cache, server: ScriptedServer, urls: list[str], method: str | None, workers: int, batched: bool
) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    sampler: Any = data.DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    how: dict[str, Any] = {"sampler": Lookahead(sampler, dataset), "batch_size": 5}
    if batched:
        how = {"batch_sampler": Lookahead(data.BatchSampler(sampler, 5, drop_last=False), dataset)}
    else:
        assert len(how["sampler"]) == OBJECTS // 2
    loader = data.DataLoader(
        dataset, num_workers=workers, collate_fn=listed, persistent_workers=workers > 0, multiprocessing_context=method, **how
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wanted = list(sampler)
        assert [i for batch in loader for i in batch] == wanted
    assert server.gets == len({request.path for request in server.requests})


@pytest.mark.rotates
def test_half_a_budget_serves_almost_half_of_what_workers_read(tmp_path: Path, server: ScriptedServer) -> None:
    total, size = 600, 8_192
    many = [server.put(f"/many/{i}.bin", bytes(size)) for i in range(total)]
    fetched = []
    with forebay.Cache(tmp_path / "half", budget=total * size // 2, max_age="forever") as cache:
        dataset = UrlDataset(many, lambda url, data: len(data), cache=cache)
        order = Lookahead(data.RandomSampler(dataset), dataset, workers=4)
        loader = data.DataLoader(dataset, batch_size=8, sampler=order, num_workers=2, persistent_workers=True)
        for _ in range(3):
            before = server.gets
            assert sum(len(batch) for batch in loader) == total
            fetched.append(server.gets - before)
    assert fetched[-1] < 0.6 * total


def test_what_comes_is_there_before_it_is_asked_for(cache: forebay.Cache, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    order = iter(Lookahead(range(OBJECTS), dataset, workers=4))
    assert next(order) == 0
    for i in range(4):
        until(lambda i=i: cache.entry(urls[i]) is not None, urls[i])
    assert list(order) == list(range(1, OBJECTS))


def test_the_window_bounds_what_is_drawn(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    drawn: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            drawn.append(len(drawn))
            yield drawn[-1] % OBJECTS

    order = iter(Lookahead(endless(), dataset, window=30_000, workers=2))
    for i in range(50):
        assert next(order) == i % OBJECTS
        until(lambda i=i: cache.entry(urls[i % OBJECTS]) is not None, urls[i % OBJECTS])
        assert len(drawn) <= i + 12
    order.close()  # type: ignore[attr-defined]
    assert server.gets <= OBJECTS


@pytest.mark.rotates
def test_a_horizon_draws_so_far_ahead_and_yields_the_same(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    chosen, drawn = [i % OBJECTS for i in range(5 * OBJECTS)], list[int]()

    def draw() -> Iterator[int]:
        for index in chosen:
            drawn.append(index)
            yield index

    order = iter(Lookahead(draw(), dataset, window=10_000, horizon=2 * OBJECTS, workers=2))
    assert next(order) == 0
    assert 2 * OBJECTS <= len(drawn) <= 2 * OBJECTS + 12
    assert list(order) == chosen[1:]
    assert server.gets <= OBJECTS


@pytest.mark.rotates
def test_epochs_reach_the_sampler(cache: forebay.Cache, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    sampler = data.DistributedSampler(dataset, num_replicas=1, rank=0)
    ahead = Lookahead(sampler, dataset)
    ahead.set_epoch(5)
    assert sampler.epoch == 5
    first = list(ahead)
    ahead.set_epoch(6)
    second = list(ahead)
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_loop_that_ends_early_ends_the_look_ahead(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    order = iter(Lookahead(range(OBJECTS), dataset, window=10_000, workers=1))
    assert next(order) == 0
    order.close()  # type: ignore[attr-defined]
    assert server.gets < OBJECTS
    assert [dataset[i] for i in range(3)] == [0, 1, 2]


def test_an_object_that_is_missing_is_the_workers_error(cache: forebay.Cache, server: ScriptedServer, urls: list[str]) -> None:
    dataset = UrlDataset([*urls[:3], f"{server.url}/none"], number, cache=cache)
    loader = data.DataLoader(dataset, sampler=Lookahead(range(4), dataset), batch_size=1, collate_fn=listed)
    assert type(raised_by(loader)) is errors.NotFound
    assert [cache.entry(url) is not None for url in urls[:3]] == [True] * 3


@pytest.mark.rotates
def test_s01_a_worker_that_is_killed_in_the_middle_of_a_look_ahead_leaves_nothing(cache: forebay.Cache, tmp_path: Path) -> None:
    """The look-ahead is that of the process that runs the loader: it goes on, and what it has fetched is not fetched again."""
    with nginx(tmp_path / "nginx") as server:
        count, workers, batch = 16, 4, 3
        objects = Objects(server, "killed", count, 150_000, place="/slow")
        dataset = UrlDataset(objects.urls, Killing(str(tmp_path / "mark"), objects), cache=cache)
        loader = data.DataLoader(
            dataset,
            batch_size=batch,
            sampler=Lookahead(range(count), dataset, workers=workers),
            num_workers=2,
            collate_fn=listed,
            multiprocessing_context="fork",
        )
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            list(loader)
        assert [number for numbers in loader for number in numbers] == list(range(count))
        gets = objects.gets()
        assert len(gets) == count
        assert sum(gets) <= count + workers + 2 * batch  # what the look-ahead, and the workers, had in flight
        assert cache.stats().fallbacks == 0
        brim(cache)


class Killing:
    """Decodes an object to its number. The process that gets number 7 first is killed."""

    def __init__(self, mark: str, objects: Objects) -> None:
        self.mark, self.objects = mark, objects

    def __call__(self, url: str, data: memoryview) -> int:
        number = int(url.rpartition("-")[2])
        assert bytes(data) == self.objects.body(number)
        if number == 7 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def test_what_the_sampler_raises_reaches_the_loop(cache: forebay.Cache, urls: list[str]) -> None:
    dataset = UrlDataset(urls, number, cache=cache)
    order = iter(Lookahead([0, 1, OBJECTS], dataset))  # the last one is outside
    assert [next(order), next(order), next(order)] == [0, 1, OBJECTS]
    with pytest.raises(IndexError):
        next(order)


def test_what_has_no_urls_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="UrlDataset"):
        Lookahead(range(3), [1, 2, 3])
