"""Epochs over more than fits, through the public calls and from nginx: the node keeps the share that fits, by itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import forebay
from forebay.cache import fetcher_of
from forebay.sources import UrlSource
from tests.processes import fork
from tests.servers.nginx import Nginx, nginx
from tests.traces import permutations

COUNT = 400
SIZES = random.Random(3).choices(range(2_000, 40_000), k=COUNT)
CHARGED = sum(-(-size // 4096) * 4096 for size in SIZES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with nginx(tmp_path_factory.mktemp("nginx") / "server") as server:
        for number, size in enumerate(SIZES):
            server.put(f"{number:04d}", number.to_bytes(2, "big") * (size // 2))
        yield server


def requests(server: Nginx) -> int:
    return len(server.lines())


def epoch_by_two(root: Path, work: Callable[[forebay.Cache, Sequence[int]], None], epoch: Sequence[int]) -> None:
    """Two young processes read half of the objects each."""

    def part(keys: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            with forebay.Cache(root, max_age="forever") as cache:
                work(cache, keys)

        return run

    children = [fork(part(epoch[first::2])) for first in (0, 1)]
    for child in children:
        child.result()
        child.close()


@pytest.mark.rotates
def test_half_a_budget_serves_nearly_half_of_each_epoch(server: Nginx, quick_path: Path) -> None:
    root = quick_path / "root"
    forebay.Cache(root, budget=CHARGED // 2, min_free=0).close()

    def read(cache: forebay.Cache, keys: Sequence[int]) -> None:
        for key in keys:
            assert cache.read(f"{server.url}/{key:04d}")[:2] == key.to_bytes(2, "big")

    fetched = []
    for epoch in permutations(COUNT, 4):
        before = requests(server)
        epoch_by_two(root, read, epoch)
        fetched.append(requests(server) - before)
    assert fetched[0] == COUNT
    assert max(fetched[2:]) <= COUNT - 0.85 * COUNT / 2, fetched
    with forebay.Cache(root) as cache:
        assert cache.stats().leading == {"urls": "bimodal"}
        assert cache.check() == []


@pytest.mark.rotates
def test_a_prefetcher_with_half_a_budget_keeps_nearly_half(server: Nginx, quick_path: Path) -> None:
    source = UrlSource(server.url, version="1")
    with forebay.Cache(quick_path / "root", budget="1GB", min_free=0) as cache:
        fetched = []
        for epoch in permutations(COUNT, 4):
            with cache.prefetcher(source, name="pool", budget=sum(SIZES) // 2, workers=2) as pool:
                before = requests(server)
                for key, data in zip(epoch, pool.stream((f"{key:04d}" for key in epoch), ahead=4), strict=True):
                    assert bytes(data[:2]) == key.to_bytes(2, "big")
                fetched.append(requests(server) - before)
        assert cache.stats().leading["pool"] == "bimodal"
    assert max(fetched[2:]) <= COUNT - 0.85 * COUNT / 2, fetched


@pytest.mark.rotates
def test_what_was_warmed_stays_for_its_reader(server: Nginx, quick_path: Path) -> None:
    with forebay.Cache(quick_path / "root", budget=CHARGED // 2, min_free=0, max_age="forever") as cache:
        for epoch in permutations(COUNT, 3):
            for key in epoch:
                cache.read(f"{server.url}/{key:04d}")
        assert cache.stats().leading["urls"] == "bimodal"
        urls = [f"{server.url}/moved/../{key:04d}?again" for key in range(COUNT // 4)]
        assert not cache.warm(urls).failed
        before = requests(server)
        for url in urls:
            cache.read(url)
        assert requests(server) == before


def test_what_a_look_ahead_fetched_is_there_at_its_turn(server: Nginx, quick_path: Path) -> None:
    with forebay.Cache(quick_path / "root", budget=CHARGED // 2, min_free=0, max_age="forever") as cache:
        fetched = []
        for epoch in permutations(COUNT, 4):
            urls, before = [f"{server.url}/{key:04d}" for key in epoch], requests(server)
            with cache.lookahead(urls, window="200KB") as ahead:
                for key, data in zip(epoch, ahead, strict=True):
                    assert data[:2] == key.to_bytes(2, "big")
            lines = server.lines()[before:]
            names = [line.split()[6] for line in lines]
            assert len(names) == len(set(names))  # none was evicted before it was read
            fetched.append(len(names))
        assert cache.stats().leading["urls"] == "bimodal"
    assert max(fetched[2:]) <= COUNT - 0.85 * COUNT / 2, fetched


def test_a_root_whose_urls_were_lru_keeps_its_policy_until_it_is_changed(server: Nginx, quick_path: Path) -> None:
    """Such as the root of an earlier version."""
    with forebay.Cache(quick_path / "root", budget=1 << 30, min_free=0) as cache:
        cache.space("urls", policy="lru")
    with forebay.Cache(quick_path / "root") as cache:
        cache.read(f"{server.url}/0000")
        assert cache.stats().leading == {}
        cache.space("urls", policy="auto")
        cache.read(f"{server.url}/0001")
        assert cache.stats().leading == {"urls": "lru"}


def test_the_policy_of_urls_survives_the_loss_of_the_catalog(server: Nginx, quick_path: Path) -> None:
    for policy, leading in {"lru": {}, "auto": {"urls": "lru"}}.items():
        root = quick_path / policy
        with forebay.Cache(root, budget=1 << 30) as cache:
            cache.space("urls", policy=policy)
        for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
            (root / name).unlink(missing_ok=True)
        with forebay.Cache(root) as cache:
            cache.read(f"{server.url}/0000")
            assert cache.stats().leading == leading


def test_stats_and_doctor_say_which_leads(server: Nginx, quick_path: Path) -> None:
    root = str(quick_path / "root")
    with forebay.Cache(root, budget=1 << 30, max_age="forever") as cache:
        for key in range(20):
            cache.read(f"{server.url}/{key:04d}")
        leading = json.loads(json.dumps(cache.stats().as_dict()))["leading"]
    assert leading == {"urls": "lru"}
    shown = {verb: command(verb, "--root", root) for verb in ("stats", "doctor")}
    assert "eviction of urls" in shown["stats"]
    assert "lru: of the last 20 uses, lru would have hit 0, bimodal insertion 0" in " ".join(shown["doctor"].split())


def command(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "forebay.cli", *words], capture_output=True, text=True, timeout=60).stdout


def test_a_plan_removes_what_eviction_would_take_first(server: Nginx, quick_path: Path) -> None:
    with forebay.Cache(quick_path / "root", budget=1 << 30, min_free=0, max_age="forever") as cache:
        urls = [f"{server.url}/{key:04d}" for key in range(20)]
        for url in urls:
            cache.read(url)
        with forebay.Cache(quick_path / "root") as same:
            assert not fetcher_of(same).store.prefetching.dismiss("urls", [urls[15], urls[12]])
        planned = [victim.name for victim in cache.plan(cache.budget).victims]
    assert planned == [urls[15], urls[12], *(url for url in urls if url not in (urls[15], urls[12]))]


def policies(root: Path) -> set[str]:
    return {path.name for path in (root / "shared").glob("policy-*")}


def read_and_lose_the_catalog(root: Path, source: Path) -> None:
    with forebay.Cache(root, budget=64 << 20, min_free=0) as cache:
        cache.read(source, force=True, refresh=True)
        cache.put("value", b"1")
    for path in root.glob("catalog.sqlite*"):
        path.unlink()


def test_the_policies_of_a_lost_catalog_go_with_the_first_write(tmp_path: Path) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.write_bytes(bytes(30_000))
    seen = []
    for _ in range(3):
        read_and_lose_the_catalog(root, source)
        seen.append(policies(root))
    assert [len(names) for names in seen] == [len(seen[0])] * 3
    assert len(set.union(*seen)) == 3 * len(seen[0]) > 0


@pytest.mark.parametrize("command", ["repair", "prune"])
def test_the_policies_that_older_versions_left_are_found_and_removed(tmp_path: Path, command: str) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.write_bytes(bytes(30_000))
    with forebay.Cache(root, budget=64 << 20, min_free=0) as cache:
        cache.read(source, force=True)
        here = policies(root)
        assert here
        for number in (12345, (1 << 62) + 1):
            (root / "shared" / f"policy-{number}").write_bytes(bytes(100_000))
        assert [problem.kind for problem in cache.check()] == ["stray"] * 2
        if command == "repair":
            assert len(cache.repair()) == 2
        else:
            assert cache.prune().execute().stray_files == 2
        assert policies(root) == here
        assert cache.check(deep=True) == []
