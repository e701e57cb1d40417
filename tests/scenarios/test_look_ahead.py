"""Look-aheads with real processes, from nginx: one is killed, two have different orders, an order is not kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests.harness import MiB, assert_settled
from tests.items import until
from tests.processes import Line, talk_to
from tests.scenarios.test_prefetch import brim
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "server") as server:
        yield server


class Objects:
    """Objects of one size, each with its own bytes. ``place``: see `Nginx`."""

    def __init__(self, nginx: Nginx, name: str, count: int, size: int, *, place: str = "") -> None:
        self._nginx, self._name, self._size = nginx, name, size
        urls = [nginx.put(f"{name}-{number}", self.body(number)) for number in range(count)]
        self.urls = [url.replace(nginx.url, nginx.url + place) for url in urls]

    def body(self, number: int) -> bytes:
        return random.Random(f"{self._name} {number}").randbytes(self._size)

    def read(self, ahead: Any, numbers: list[int]) -> None:
        """The next objects are these."""
        for number in numbers:
            assert bytes(next(ahead)) == self.body(number)

    def gets(self) -> list[int]:
        """How often each that was requested was."""
        return list(self._nginx.gets(f"{self._name}-").values())


@pytest.mark.rotates
@pytest.mark.parametrize(("size", "place"), [(150_000, "/slow"), (4_000_000, "/medium")], ids=["collected", "reserved"])
def test_s01_a_look_ahead_that_is_killed_leaves_nothing_and_the_others_go_on(root: Path, nginx: Nginx, size: int, place: str) -> None:
    count, workers, budget = 12, 4, 80 * MiB
    objects = Objects(nginx, f"killed-{size}", count, size, place=place)

    def job(line: Line) -> None:
        with forebay.Cache(root) as cache, cache.lookahead(objects.urls, workers=workers) as ahead:
            if size > 1 << 18:
                until(lambda: cache.stats().bytes_reserved > 0, "an object under way")
            else:
                objects.read(ahead, [0])
            line.say("some are on their way")
            list(ahead)

    with forebay.Cache(root, budget=budget, min_free=0) as cache:
        with talk_to(job) as other:
            other.hear()
            with cache.lookahead(objects.urls[::-1], workers=workers) as ahead:
                other.kill()
                objects.read(ahead, list(range(count))[::-1])
        assert cache.stats().fallbacks == 0
        gets = objects.gets()
        assert len(gets) == count
        assert sum(gets) <= count + 2 * workers  # what was in flight, or had come and was not published yet
        brim(cache)
    assert_settled(root, budget)


@pytest.mark.parametrize("share", [0.75, 0.15])
def test_s07_two_jobs_with_different_orders_over_more_than_fits(
    root: Path, nginx: Nginx, children: Start, barrier: Callable[[int], Any], share: float
) -> None:
    """Both end, with the right bytes, and no object is requested more often than it is read."""
    count, size, epochs = 40, 100_000, 3
    objects, budget, together = Objects(nginx, f"jobs-{share}", count, size), int(count * size * share), barrier(2)

    def job(seed: int) -> int:
        with forebay.Cache(root) as cache:
            together.wait(60)
            for epoch in range(epochs):
                order = random.Random(f"{seed} {epoch}").sample(range(count), count)
                with cache.lookahead([objects.urls[number] for number in order], workers=4) as ahead:
                    objects.read(ahead, order)
            return cache.stats().fallbacks

    forebay.Cache(root, budget=budget, min_free=0).close()
    jobs = [children(partial(job, seed)) for seed in range(2)]
    fallbacks = max(job.result() for job in jobs)
    assert not fallbacks or share < 0.5  # less room than both have under way at a time
    assert sum(objects.gets()) <= 2 * epochs * count
    with forebay.Cache(root) as cache:
        brim(cache)
    assert_settled(root, budget)


@pytest.mark.parametrize("share", [2.0, 0.5])
@pytest.mark.parametrize("kind", ["reversed", "other", "every third"])
def test_an_order_that_is_not_kept_costs_at_most_what_was_fetched_ahead(root: Path, nginx: Nginx, kind: str, share: float) -> None:
    """Nothing that was fetched in vain remains held, and nothing waits for what is never read."""
    count, size, budget = 30, 100_000, int(30 * 100_000 * share)
    objects = Objects(nginx, f"{kind[:3]}-{share}", count, size)
    numbers = list(range(count))
    order = {"reversed": numbers[::-1], "other": random.Random(1).sample(numbers, count), "every third": numbers[::3]}[kind]
    with forebay.Cache(root, budget=budget, min_free=0) as cache:
        with cache.lookahead(objects.urls, workers=4) as ahead:
            for number in order:
                assert bytes(ahead.read(objects.urls[number])) == objects.body(number)
        assert cache.stats().fallbacks == 0
        assert sum(objects.gets()) <= (count if share > 1 else 2 * count)
        brim(cache)
    assert_settled(root, budget)
