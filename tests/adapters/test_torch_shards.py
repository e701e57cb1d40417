"""Tar shards as an iterable dataset of PyTorch: each sample once over all ranks and workers, each shard fetched once, resumed anywhere."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests.adapters.test_torch import raised_by
from tests.harness import KiB, MiB
from tests.items import until
from tests.processes import in_child
from tests.scenarios.test_prefetch import brim
from tests.servers.nginx import nginx

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

from forebay.adapters.torch import Shards  # noqa: E402 - PyTorch may be missing

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")
SHARDS, SAMPLES = 6, 10
KEYS = [f"{shard}-{number}" for shard in range(SHARDS) for number in range(SAMPLES)]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache


def tar(members: Iterable[tuple[str, bytes]], **options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as file:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            file.addfile(info, io.BytesIO(body))
    return out.getvalue()


def members(shard: int, samples: int = SAMPLES) -> Iterator[tuple[str, bytes]]:
    for number in range(samples):
        yield f"{shard}-{number}.jpg", picture(f"{shard}-{number}")
        yield f"{shard}-{number}.cls", str(number).encode()


def picture(key: str) -> bytes:
    return key.encode() * 2000


def put(server: ScriptedServer, body: Callable[[int], bytes] = lambda shard: tar(members(shard)), count: int = SHARDS) -> str:
    """Serve shards; their URLs as one pattern."""
    for shard in range(count):
        server.put(f"/shard-{shard:03}.tar", body(shard))
    return f"{server.url}/shard-{{000..{count - 1:03}}}.tar"


@pytest.fixture
def urls(server: ScriptedServer) -> str:
    return put(server)


def stored(server: ScriptedServer) -> int:
    return sum(len(served.body) for served in server.objects.values())


def keys_of(samples: Iterable[dict[str, Any]]) -> list[str]:
    """The keys of samples, each of which has its own bytes."""
    keys = []
    for sample in samples:
        key = sample["__key__"]
        assert sample.keys() == {"__key__", "__url__", "jpg", "cls"}
        assert sample["__url__"].endswith(f"/shard-00{key[0]}.tar")
        assert (sample["jpg"], sample["cls"]) == (picture(key), key[2:].encode())
        keys.append(key)
    return keys


def loaded(dataset: Shards, workers: int, **options: Any) -> Any:
    return data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)


# -- loaders -----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize(("method", "persistent"), [("fork", True), ("forkserver", False)])
def test_s17_workers_read_each_sample_once_and_fetch_each_shard_once(
    cache: forebay.Cache, server: ScriptedServer, urls: str, method: str, persistent: bool
) -> None:
    multiprocessing.set_forkserver_preload([__name__])  # PyTorch is imported by the server, not by each worker
    dataset = Shards(urls, cache=cache, shuffle_shards=True, buffer=15, seed=7)
    loader = loaded(dataset, 2, persistent_workers=persistent, multiprocessing_context=method)
    orders = []
    for epoch in (0, 1, 0)[: 3 if method == "fork" else 2]:
        dataset.set_epoch(epoch)
        orders.append(keys_of(loader))
        assert sorted(orders[-1]) == KEYS
    assert orders[0] != orders[1]
    assert orders[2:] in ([], orders[:1])
    assert server.gets == SHARDS
    assert server.sent <= 1.02 * stored(server)


def test_without_workers_and_without_shuffling_the_order_is_that_of_the_shards(
    cache: forebay.Cache, server: ScriptedServer, urls: str
) -> None:
    dataset = Shards(urls, cache=cache)
    for _ in range(2):
        assert keys_of(dataset) == KEYS
        assert keys_of(loaded(dataset, 0)) == KEYS
    assert (server.gets, server.sent) == (SHARDS, stored(server))


def test_a_buffer_mixes_samples_of_several_shards_and_loses_none(cache: forebay.Cache, urls: str) -> None:
    for buffer in (1, 2, 25, 1000):
        keys = keys_of(Shards(urls, cache=cache, buffer=buffer))
        assert sorted(keys) == KEYS
        assert (keys == KEYS) == (buffer == 1)
    first = keys_of(Shards(urls, cache=cache, buffer=25))[:10]
    assert len({key[0] for key in first}) > 1
    assert keys_of(Shards(urls, cache=cache, buffer=25, seed=1)) != keys_of(Shards(urls, cache=cache, buffer=25))


def test_shards_are_shuffled_by_seed_and_epoch(cache: forebay.Cache, urls: str) -> None:
    def order(seed: int, epoch: int) -> list[str]:
        dataset = Shards(urls, cache=cache, shuffle_shards=True, seed=seed)
        dataset.set_epoch(epoch)
        keys = keys_of(dataset)
        assert sorted(keys) == KEYS
        return keys

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(keys) for keys in orders}) == 6
    assert order(1, 2) == orders[-1]


def test_a_worker_without_shards_yields_nothing(cache: forebay.Cache, server: ScriptedServer) -> None:
    dataset = Shards(put(server, count=2), cache=cache)
    assert sorted(keys_of(loaded(dataset, 3))) == KEYS[: 2 * SAMPLES]


def test_a_worker_that_is_killed_leaves_the_shards_that_it_has_fetched(
    cache: forebay.Cache, server: ScriptedServer, urls: str, tmp_path: Path
) -> None:
    mark = tmp_path / "killed"

    def decode(name: str, body: bytes) -> bytes:
        if name == "2-5.jpg" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return body

    loader = loaded(Shards(urls, cache=cache, decode=decode), 2, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        keys_of(loader)
    assert sorted(keys_of(loader)) == KEYS
    gets = collections.Counter(request.path for request in server.requests)
    assert gets["/shard-000.tar"] == gets["/shard-002.tar"] == 1  # they had come, and are kept


@pytest.mark.rotates
def test_s01_a_worker_that_is_killed_while_its_next_shards_come_leaves_nothing(cache: forebay.Cache, tmp_path: Path) -> None:
    mark = tmp_path / "killed"

    def decode(name: str, body: bytes) -> bytes:
        if name == "0-5.jpg" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return body

    with nginx(tmp_path / "nginx") as server:
        samples, ahead = 30, 1
        urls = [server.put(f"shard-{shard:03}.tar", tar(members(shard, samples))) for shard in range(SHARDS)]
        slow = [url.replace(server.url, f"{server.url}/slow") for url in urls]
        loader = loaded(Shards(slow, cache=cache, decode=decode, ahead=ahead), 2, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            keys_of(loader)
        assert sorted(keys_of(loader)) == sorted(f"{shard}-{number}" for shard in range(SHARDS) for number in range(samples))
        gets = server.gets("shard")
        assert len(gets) == SHARDS
        assert gets["shard-000.tar"] == 1  # it had come
        assert gets.total() <= SHARDS + 2 * (ahead + 1)  # what both workers had in flight
        assert cache.stats().fallbacks == 0
        brim(cache)


def test_shards_that_are_replaced_while_they_are_read_are_each_of_one_version(tmp_path: Path) -> None:
    def body(version: int) -> bytes:
        size = 30_000 + 700 * version
        return tar((f"{number}.bin", bytes([version]) * size) for number in range(40))

    with nginx(tmp_path / "nginx") as server, forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, max_age=0) as cache:
        urls = [server.put(f"shard-{shard}.tar", body(0)) for shard in range(3)]
        dataset = Shards(urls, cache=cache, ahead=1)
        seen = []
        for version in (1, 2, 3):
            for number, sample in enumerate(dataset):
                versions, size = set(sample["bin"]), len(sample["bin"])
                assert versions == {(size - 30_000) // 700}
                seen.append((version, sample["__url__"], versions.pop()))
                if number == 5:
                    for shard in range(3):
                        server.replace(f"shard-{shard}.tar", body(version))
        per_shard = collections.Counter(seen)
        assert set(per_shard.values()) == {40}, "a shard of two versions"
        assert len(per_shard) == 9
        assert {version - 1 - of for version, _, of in per_shard} <= {0, -1}
        assert cache.check(deep=True) == []


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2), (3, 1)])
def test_s17_ranks_and_their_workers_read_each_sample_once(
    cache: forebay.Cache, server: ScriptedServer, urls: str, nodes: int, ranks: int, workers: int
) -> None:
    seen = []
    for rank in range(nodes * ranks):
        dataset = Shards(urls, cache=cache, shuffle_shards=True, buffer=7, world=forebay.World(nodes, ranks, 1, rank))
        dataset.set_epoch(1)
        seen.append(keys_of(loaded(dataset, workers)))
    assert sorted(key for keys in seen for key in keys) == KEYS
    assert max(map(len, seen)) - min(map(len, seen)) <= SAMPLES
    assert server.gets == SHARDS


def test_ranks_are_those_of_the_launcher(cache: forebay.Cache, urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for rank in range(2):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        seen += keys_of(loaded(Shards(urls, cache=cache), 2))
    assert sorted(seen) == KEYS


RANK = """
import sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from forebay.adapters.torch import Shards

root, urls, rank, meeting, method, workers = sys.argv[1:]
dataset = None
if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
    dataset = Shards(urls, cache={"root": root})
    loader = DataLoader(dataset, batch_size=None, num_workers=int(workers), multiprocessing_context=method)
    print(*(sample["__key__"] for sample in loader))
    dist.destroy_process_group()
"""


@pytest.mark.rotates
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_s17_ranks_that_only_a_process_group_knows(cache: forebay.Cache, urls: str, tmp_path: Path, method: str, workers: int) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, str(program), str(cache.path), urls]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting"), method, str(workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], results
    assert sorted(key for out, _ in results for key in out.split()) == KEYS


def test_a_pickle_has_no_rank(cache: forebay.Cache, urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(Shards(urls, cache=cache))

    def rank(number: int) -> list[str]:
        for name, value in (("RANK", number), ("WORLD_SIZE", 2), ("LOCAL_RANK", number), ("LOCAL_WORLD_SIZE", 2)):
            os.environ[name] = str(value)
        return keys_of(loaded(pickle.loads(sent), 2))

    assert sorted(in_child(lambda: rank(0)) + in_child(lambda: rank(1))) == KEYS


def spawned(dataset: Shards, rank: int, line: Any) -> None:
    """A rank that is spawned with its dataset, and forks workers of its own."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
        os.environ[name] = str(value)
    line.send(keys_of(dataset) + keys_of(loaded(dataset, 2, multiprocessing_context="fork")))


def test_ranks_that_are_spawned_with_a_dataset_have_parts_of_their_own(cache: forebay.Cache, urls: str) -> None:
    context, seen = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload([__name__])
    for rank in range(2):
        ours, its = context.Pipe()
        process = context.Process(target=spawned, args=(Shards(urls, cache=cache), rank, its))
        process.start()
        its.close()
        seen += ours.recv()
        process.join()
    assert sorted(seen) == sorted(KEYS * 2)


# -- shards ------------------------------------------------------------------------------------------------------------


def test_the_next_shards_are_fetched_while_one_is_read(cache: forebay.Cache, server: ScriptedServer, urls: str) -> None:
    served = server.objects["/shard-000.tar"]
    served.stall_after = 100
    samples = iter(Shards(urls, cache=cache, ahead=2))
    first = in_thread(lambda: keys_of([next(samples)]))
    assert server.stalled.wait(60)
    until(lambda: all(cache.entry(f"{server.url}/shard-00{n}.tar") is not None for n in (1, 2)))
    server.go.set()
    assert first() == ["0-0"]
    assert {request.path for request in server.requests} == {f"/shard-00{n}.tar" for n in range(3)}
    assert keys_of(samples) == KEYS[1:]


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    pool = ThreadPoolExecutor(1)
    result = pool.submit(work).result
    pool.shutdown(wait=False)
    return result


def test_whole_shards_are_entries_that_other_calls_find(cache: forebay.Cache, server: ScriptedServer, urls: str) -> None:
    cache.warm([f"{server.url}/shard-000.tar"])
    assert keys_of(Shards(urls, cache=cache)) == KEYS
    for shard in range(SHARDS):
        assert cache.read(f"{server.url}/shard-00{shard}.tar") == tar(members(shard))
    assert server.gets == SHARDS


@pytest.mark.rotates
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    # Some: the shards that two workers read and fetch ahead fit together. Of fewer, one would evict what the other has fetched ahead.
    [{"enabled": False}, {"budget": 64 * KiB, "min_free": 0}, {"budget": 400 * KiB, "min_free": 0}],
    ids=["no cache", "room for none", "room for some"],
)
def test_without_room_a_shard_is_fetched_once_an_epoch(
    server: ScriptedServer, urls: str, tmp_path: Path, options: dict[str, Any], workers: int
) -> None:
    dataset = Shards(urls, cache={"root": tmp_path / "root", **options}, buffer=15)
    for epoch in (1, 2):
        assert sorted(keys_of(loaded(dataset, workers))) == KEYS
        assert server.sent <= 1.02 * epoch * stored(server)
    dataset._cache.close()


def test_samples_are_grouped_as_webdataset_groups_them(cache: forebay.Cache, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    names = ["a.jpg", "a.cls", "b.seg.PNG", "b.json", "d/a.jpg", "d.x/a.b.jpg", "d.x/plain", "plain", "a.txt", "__meta__", "ü.txt"]
    path = tmp_path / "shard.tar"
    path.write_bytes(tar((name, f"body of {name}".encode()) for name in names))
    theirs = [
        {key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    ours = list(Shards(path, cache=cache))
    assert all(sample.pop("__url__") == str(path) for sample in ours)
    assert ours == theirs
    assert [sample["__key__"] for sample in ours] == ["a", "b", "d/a", "d.x/a", "a", "ü"]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_all_formats(cache: forebay.Cache, tmp_path: Path, kind: int) -> None:
    folder = "/".join(["folder" * 4] * 4)
    (tmp_path / "shard.tar").write_bytes(tar([(f"{folder}/a.jpg", b"1"), (f"{folder}/a.cls", b"2")], format=kind))
    (sample,) = Shards([tmp_path / "shard.tar"], cache=cache)
    assert (sample["__key__"], sample["jpg"], sample["cls"]) == (f"{folder}/a", b"1", b"2")


def test_members_are_decoded_by_name_and_extension(cache: forebay.Cache, urls: str) -> None:
    dataset = Shards(urls, cache=cache, decode={"cls": lambda name, body: int(body), "jpg": lambda name, body: (name, len(body))})
    sample = next(iter(dataset))
    assert (sample["cls"], sample["jpg"]) == (0, ("0-0.jpg", len(picture("0-0"))))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "within a member": lambda body: body[: len(body) // 2 + 700],
    "within a header": lambda body: body[: 512 * 30 + 100],
    "no tar": lambda body: b"<html>" * 1000,
    "compressed": lambda body: b"\x1f\x8b" + body,
    "empty": lambda body: b"",
    "two of a name": lambda body: tar([*members(1, 2), ("1-1.CLS", b"1")]),
    "a header with a wrong sum": lambda body: body[:20] + b"x" + body[21:],
}


@pytest.mark.rotates
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_next_one_follows(cache: forebay.Cache, server: ScriptedServer, damage: str) -> None:
    urls = put(server, lambda shard: DAMAGES[damage](tar(members(shard))) if shard == 1 else tar(members(shard)), count=3)
    samples = iter(Shards(urls, cache=cache))
    assert keys_of(next(samples) for _ in range(SAMPLES)) == KEYS[:SAMPLES]
    with pytest.raises(errors.BadArchive, match=r"shard-001\.tar"):
        next(samples)
    assert keys_of(samples) == KEYS[2 * SAMPLES : 3 * SAMPLES]


@pytest.mark.parametrize("workers", [0, 1])
def test_s29_errors_of_a_shard_reach_the_main_process(cache: forebay.Cache, server: ScriptedServer, workers: int) -> None:
    urls = put(server, count=2)
    server.objects["/shard-001.tar"].body = b"<html>" * 1000
    for wrong, kind, name in ((urls, errors.BadArchive, "shard-001.tar"), (f"{server.url}/missing.tar", errors.NotFound, "missing.tar")):
        error = raised_by(loaded(Shards(wrong, cache=cache), workers))
        assert isinstance(error, kind)
        assert name in str(error)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_interrupt_while_a_shard_is_fetched_loses_none(
    cache: forebay.Cache, urls: str, ahead: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def interrupted(call: Callable[..., memoryview]) -> Callable[..., memoryview]:
        def interrupt(*arguments: Any) -> memoryview:
            asked.append(1)
            if len(asked) == 3 and moment == "before":
                raise KeyboardInterrupt
            found = call(*arguments)
            if len(asked) == 3:
                raise KeyboardInterrupt
            return found

        return interrupt

    class Interrupted(Iterator[memoryview]):
        def __init__(self, order: Iterator[memoryview]) -> None:
            self._next = interrupted(order.__next__)

        def __next__(self) -> memoryview:
            return self._next()

    look_ahead = forebay.Cache.lookahead
    monkeypatch.setattr(forebay.Cache, "lookahead", lambda *arguments, **options: Interrupted(look_ahead(*arguments, **options)))
    monkeypatch.setattr(forebay.Cache, "read", interrupted(forebay.Cache.read))
    samples, found = iter(Shards(urls, cache=cache, ahead=ahead)), list[str]()
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            found += (sample["__key__"] for sample in samples)
    assert len(asked) > 3
    assert found == KEYS


def test_a_forked_child_goes_on_with_an_iteration_of_its_parent(cache: forebay.Cache, urls: str) -> None:
    samples = iter(Shards(urls, cache=cache))
    next(samples)
    assert in_child(lambda: keys_of(samples)) == KEYS[1:]
    assert keys_of(samples) == KEYS[1:]


def test_impossible_arguments_are_refused(cache: forebay.Cache) -> None:
    for wrong in ({"buffer": -1}, {"ahead": -1}):
        with pytest.raises(errors.ConfigError, match="not negative"):
            Shards("/a.tar", cache=cache, **wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="name at least one"):
        Shards([], cache=cache)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("buffer", [0, 15, 1000])
@pytest.mark.parametrize("stop", [0, SAMPLES, 23, 60])
def test_a_state_leaves_exactly_the_rest(cache: forebay.Cache, urls: str, buffer: int, stop: int) -> None:
    def shards() -> Shards:
        return Shards(urls, cache=cache, shuffle_shards=True, buffer=buffer, seed=3)

    whole, again = shards(), shards()
    whole.set_epoch(4)
    samples = iter(whole)
    begun = keys_of(next(samples) for _ in range(stop))
    state = json.loads(json.dumps(whole.state_dict()))
    rest = keys_of(samples)
    assert sorted(begun + rest) == KEYS
    again.load_state_dict(state)
    assert again.state_dict() == state
    resumed = iter(again)
    assert again.state_dict() == state
    assert keys_of(resumed) == rest
    assert keys_of(again) == begun + rest  # the next iteration is a whole one, of the same epoch


def test_a_state_of_a_resumed_iteration_leaves_the_rest_of_it(cache: forebay.Cache, urls: str) -> None:
    def shards() -> Shards:
        return Shards(urls, cache=cache, shuffle_shards=True, buffer=15)

    expected, seen, state = keys_of(shards()), list[str](), None
    while len(seen) < len(KEYS):
        dataset = shards()
        if state is not None:
            dataset.load_state_dict(state)
        samples = iter(dataset)
        seen += keys_of(next(samples) for _ in range(12))
        del samples  # the position stays
        state = dataset.state_dict()
    assert seen == expected


def test_a_state_is_resumed_from_an_empty_cache(server: ScriptedServer, urls: str, tmp_path: Path) -> None:
    dataset = Shards(urls, cache={"root": tmp_path / "a", "budget": 64 * MiB, "min_free": 0}, buffer=5)
    samples = iter(dataset)
    keys_of(next(samples) for _ in range(45))
    state, rest, before = dataset.state_dict(), keys_of(samples), server.gets
    other = Shards(urls, cache={"root": tmp_path / "b", "budget": 64 * MiB, "min_free": 0}, buffer=5)
    other.load_state_dict(state)
    assert keys_of(other) == rest
    assert server.gets - before < SHARDS  # only what is left is fetched
    for each in (dataset, other):
        each._cache.close()


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"buffer": 16},
        {"shuffle_shards": False},
        {"urls": ["/a.tar"]},
        {"world": forebay.World(1, 3, 1, 0)},
        {"world": forebay.World(1, 2, 1, 1)},
        {"world": forebay.World(1, 1, 1, 0)},
    ],
    ids=["seed", "buffer", "shuffling", "shards", "more ranks", "another rank", "fewer ranks"],
)
def test_a_state_of_another_dataset_or_rank_is_refused(cache: forebay.Cache, urls: str, other: dict[str, Any]) -> None:
    here = {"urls": urls, "shuffle_shards": True, "buffer": 15, "world": forebay.World(1, 2, 1, 0)}
    state = Shards(**here, cache=cache).state_dict()
    Shards(**here, cache=cache, ahead=5).load_state_dict(state)
    with pytest.raises(errors.ConfigError, match=r"was saved with \w+="):
        Shards(**here | other, cache=cache).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn": -1},
        {"turn": "x"},
        {"drawn": None},
        {"epoch": 0.5},
        {"rank": []},
        {"buffered_turns": [1]},
        {"buffered_turns": None},
        {"buffered_turns": [1 << 70], "buffered_samples": [0]},
        {"buffered_turns": [0], "buffered_samples": [-1]},
    ],
    ids=repr,
)
def test_what_is_no_state_is_refused(cache: forebay.Cache, urls: str, wrong: dict[str, Any]) -> None:
    dataset = Shards(urls, cache=cache, world=forebay.World(1, 1, 1, 0))
    state = dataset.state_dict()
    for other in (None, [], "state", {}, state | wrong, {name: value for name, value in state.items() if name not in wrong}):
        with pytest.raises(errors.ConfigError):
            dataset.load_state_dict(other)  # type: ignore[arg-type]
    dataset.load_state_dict(state)


def test_a_state_of_this_process_is_refused_in_several_workers(cache: forebay.Cache, urls: str) -> None:
    dataset = Shards(urls, cache=cache)
    dataset.load_state_dict(dataset.state_dict())
    error = raised_by(loaded(dataset, 2))
    assert isinstance(error, errors.ConfigError)
    assert "saved with num_workers=1, and here it is 2" in str(error)


def test_a_process_whose_workers_iterate_has_no_state(cache: forebay.Cache, urls: str) -> None:
    dataset = Shards(urls, cache=cache)
    loader = loaded(dataset, 2)
    next(iter(loader))
    with pytest.raises(errors.ConfigError, match="StatefulDataLoader"):
        dataset.state_dict()


def test_a_shard_that_lost_samples_since_the_state_was_saved_is_named(cache: forebay.Cache, server: ScriptedServer, urls: str) -> None:
    dataset = Shards(urls, cache=cache, buffer=2)
    samples = iter(dataset)
    keys_of(next(samples) for _ in range(5))
    state = dataset.state_dict()
    server.put("/shard-000.tar", tar(members(0, 2)))
    cache.invalidate(f"{server.url}/shard-000.tar")
    dataset.load_state_dict(state)
    with pytest.raises(errors.RemoteChanged, match=r"shard-000\.tar has changed"):
        list(dataset)


# -- with torchdata ----------------------------------------------------------------------------------------------------


def stateful(dataset: Shards, workers: int, **options: Any) -> Any:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(dataset, batch_size=4, collate_fn=list, num_workers=workers, **options)


def shuffled(cache: forebay.Cache, urls: str, **options: Any) -> Shards:
    return Shards(urls, cache=cache, shuffle_shards=True, buffer=9, **options)


@pytest.mark.rotates
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was(cache: forebay.Cache, urls: str, workers: int, every: int) -> None:
    whole = [keys_of(batch) for batch in stateful(shuffled(cache, urls), workers)]
    assert sorted(key for batch in whole for key in batch) == KEYS
    for stop in (0, 1, 7, len(whole)):
        first = stateful(shuffled(cache, urls), workers, snapshot_every_n_steps=every)
        batches = iter(first)
        assert [keys_of(next(batches)) for _ in range(stop)] == whole[:stop]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        del batches, first
        again = stateful(shuffled(cache, urls), workers, persistent_workers=workers > 0 and every == 3)
        again.load_state_dict(state)
        assert [keys_of(batch) for batch in again] == whole[stop:]
        assert [keys_of(batch) for batch in again] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_an_epoch_that_has_ended_leaves_the_next_one_whole(cache: forebay.Cache, urls: str, workers: int) -> None:
    dataset = shuffled(cache, urls)
    dataset.set_epoch(2)
    first, again = stateful(dataset, workers), stateful(shuffled(cache, urls), workers)
    whole = [keys_of(batch) for batch in first]
    again.load_state_dict(first.state_dict())
    assert [keys_of(batch) for batch in again] == whole


def test_a_stateful_loader_keeps_its_epoch(cache: forebay.Cache, urls: str) -> None:
    dataset = shuffled(cache, urls)
    first = stateful(dataset, 2, persistent_workers=True)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        batches = iter(first)
        begun = [keys_of(next(batches)) for _ in range(5)]
        state = first.state_dict()
        rest = [keys_of(batch) for batch in batches]
        again = stateful(shuffled(cache, urls), 2)
        again.load_state_dict(state)
        assert [keys_of(batch) for batch in again] == rest
    assert sorted(key for batch in begun + rest for key in batch) == KEYS


@pytest.mark.parametrize("workers", [1, 3])
def test_a_state_of_another_number_of_workers_is_refused(cache: forebay.Cache, urls: str, workers: int) -> None:
    first = stateful(shuffled(cache, urls), 2)
    next(iter(first))
    again = stateful(shuffled(cache, urls), workers)
    again.load_state_dict(first.state_dict())
    error = raised_by(again)
    assert isinstance(error, errors.ConfigError)
    assert f"saved with num_workers=2, and here it is {workers}" in str(error)
