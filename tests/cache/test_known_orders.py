"""Look-aheads over more than fits, from nginx: as far as the order is known, the cache keeps what is used soonest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine.index import orders
from tests.items import until
from tests.processes import Line, talk_to
from tests.servers.nginx import Nginx, nginx
from tests.traces import hits_of_belady, permutations, zipf

COUNT = 200
SIZES = random.Random(3).choices(range(2_000, 40_000), k=COUNT)
CHARGES = [-(-size // 4096) * 4096 for size in SIZES]
LARGE = "large"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with nginx(tmp_path_factory.mktemp("nginx") / "server") as server:
        for number, size in enumerate(SIZES):
            server.put(f"{number:04d}", body(number, size))
        server.put(LARGE, body(1, 1_000_000))
        yield server


def body(number: int, size: int) -> bytes:
    return number.to_bytes(2, "big") * (size // 2)


def urls(server: Nginx, keys: Sequence[int]) -> list[str]:
    return [f"{server.url}/{key:04d}" for key in keys]


def requests(server: Nginx) -> list[str]:
    return [line.split()[6][1:] for line in server.lines()]


def hits(server: Nginx, root: Path, keys: Sequence[int], capacity: int, *, is_known: bool = True) -> int:
    """The uses that the server does not see."""
    before = len(requests(server))
    with forebay.Cache(root, budget=capacity, min_free=0, max_age="forever") as cache:
        if is_known:
            with cache.lookahead(urls(server, keys), window="200KB") as ahead:
                for key, data in zip(keys, ahead, strict=True):
                    assert data[:2] == key.to_bytes(2, "big")
        else:
            for url in urls(server, keys):
                cache.read(url)
        assert cache.check() == []
    return len(keys) - (len(requests(server)) - before)


@pytest.mark.rotates
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_uses_that_repeat_hit_nearly_as_often_as_the_best_cache(server: Nginx, quick_path: Path, share: float) -> None:
    keys, capacity = zipf(COUNT, 1000, 0.8), int(share * sum(CHARGES))
    known = hits(server, quick_path / "known", keys, capacity)
    assert known >= 0.9 * hits_of_belady(keys, CHARGES, capacity)
    assert known > hits(server, quick_path / "unknown", keys, capacity, is_known=False)


def test_epochs_in_one_order_hit_what_overlaps_too(server: Nginx, quick_path: Path) -> None:
    keys, capacity = [key for epoch in permutations(COUNT, 5) for key in epoch], sum(CHARGES) // 2
    assert hits(server, quick_path / "root", keys, capacity) >= 0.9 * hits_of_belady(keys, CHARGES, capacity)


def test_an_order_for_each_epoch_keeps_what_it_is_about_to_read(server: Nginx, quick_path: Path) -> None:
    fetched = [COUNT - hits(server, quick_path / "root", epoch, sum(CHARGES) // 2) for epoch in permutations(COUNT, 4)]
    assert max(fetched[1:]) <= COUNT - 0.85 * COUNT / 2, fetched


def test_what_is_not_used_soon_is_not_stored(server: Nginx, quick_path: Path) -> None:
    """A hot set that fits, and between its uses objects that are read once."""
    hot, keys = list(range(40)), list[int]()
    for number in range(40, COUNT):
        keys += [*random.Random(number).sample(hot, 3), number]
    before = len(requests(server))
    with forebay.Cache(quick_path / "root", budget=int(1.1 * sum(CHARGES[:40])), min_free=0, max_age="forever") as cache:
        with cache.lookahead(urls(server, hot + keys), window="100KB") as ahead:
            assert [data[:2] for data in ahead] == [key.to_bytes(2, "big") for key in hot + keys]
        assert len(requests(server)) - before <= COUNT + 0.05 * len(keys)
        stats = cache.stats()
        assert stats.fills <= 40 + 0.05 * len(keys)
        assert stats.evictions <= 0.05 * len(keys)


def test_a_large_object_that_is_not_stored_is_fetched_once(server: Nginx, quick_path: Path) -> None:
    with forebay.Cache(quick_path / "root", budget=1_200_000, min_free=0, max_age="forever") as cache:
        order = urls(server, [*range(30)] * 3)
        order.insert(60, f"{server.url}/{LARGE}")
        before = len(requests(server))
        with cache.lookahead(order, window="100KB") as ahead:
            sizes = [len(data) for data in ahead]
        assert sizes[60] == 1_000_000
        assert requests(server)[before:].count(LARGE) == 1
        assert cache.entry(f"{server.url}/{LARGE}") is None


def test_what_is_skipped_stays_until_it_was_read(server: Nginx, quick_path: Path) -> None:
    order = urls(server, [key for epoch in permutations(60, 3) for key in epoch])
    with forebay.Cache(quick_path / "root", budget=sum(CHARGES[:60]) // 2, min_free=0, max_age="forever") as cache:
        with cache.lookahead(order, window="60KB", horizon=200) as ahead:
            before = len(requests(server))
            for url in order:
                until(lambda url=url: cache.entry(url) is not None, url)
                assert ahead.skip()
                fetched = len(requests(server))
                cache.read(url)
                assert len(requests(server)) <= fetched + 16  # what is fetched ahead meanwhile
        assert len(requests(server)) - before <= len(order) - 0.4 * len(order) / 2


def test_an_iterator_is_drawn_as_far_as_it_may_be(server: Nginx, quick_path: Path) -> None:
    drawn: list[int] = []

    def order() -> Iterator[str]:
        for number in count():
            drawn.append(number)
            yield f"{server.url}/{number % 50:04d}"

    with forebay.Cache(quick_path / "root", budget=sum(CHARGES[:25]), min_free=0, max_age="forever") as cache:
        before = len(requests(server))
        with cache.lookahead(order(), window="60KB", horizon=150) as ahead:
            for number, data in enumerate(islice(ahead, 500)):
                assert data[:2] == (number % 50).to_bytes(2, "big")
                assert len(drawn) <= max(number + 2 + 150, 1024)
        assert len(requests(server)) - before <= 50 + 450 * 0.65


def test_what_the_order_raises_far_ahead_comes_at_its_turn(server: Nginx, quick_path: Path) -> None:
    def order() -> Iterator[str]:
        yield from urls(server, range(100))
        raise KeyError("the sampler's own")

    with forebay.Cache(quick_path / "root", budget="100MB", min_free=0) as cache:
        with cache.lookahead(order(), window="60KB", horizon=500) as ahead:
            assert [next(ahead)[:2] for _ in range(100)] == [key.to_bytes(2, "big") for key in range(100)]
            with pytest.raises(KeyError, match="the sampler's own"):
                next(ahead)


@pytest.mark.parametrize("horizon", [-1, 1.5, True, (1 << 20) + 1])
def test_a_horizon_that_is_no_number_of_objects_is_refused(cache: forebay.Cache, horizon: int) -> None:
    with pytest.raises(errors.ConfigError, match="horizon"):
        cache.lookahead([], horizon=horizon)


def read_in_step(server: Nginx, root: Path, first: Sequence[int], second: Sequence[int], capacity: int) -> list[str]:
    """The requests of two processes, each with a look-ahead of its own order, that take turns."""

    def work(line: Line) -> None:
        with (
            forebay.Cache(root, budget=capacity, min_free=0, max_age="forever") as cache,
            cache.lookahead(urls(server, second), window="60KB", workers=2) as ahead,
        ):
            line.say()
            for key in second:
                line.hear()
                assert next(ahead)[:2] == key.to_bytes(2, "big")
                line.say()

    before = len(requests(server))
    with (
        talk_to(work) as other,
        forebay.Cache(root, budget=capacity, min_free=0, max_age="forever") as cache,
        cache.lookahead(urls(server, first), window="60KB", workers=2) as ahead,
    ):
        other.hear()
        for key in first:
            assert next(ahead)[:2] == key.to_bytes(2, "big")
            other.say()
            other.hear()
    return requests(server)[before:]


def test_two_look_aheads_keep_what_the_other_uses_next(
    server: Nginx, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The second one reads what the first one has read twenty turns ago, and will not read again."""
    monkeypatch.setattr(orders, "LOOK_AGAIN", 0.01)
    first = list(range(COUNT))
    second = [COUNT - 1] * 20 + first[:-20]
    fetched = read_in_step(server, quick_path / "root", first, second, sum(CHARGES) // 3)
    assert len(fetched) <= 1.1 * COUNT, len(fetched)
