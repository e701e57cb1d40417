"""What a program of a user's looks like to a type checker: nothing of ours is unknown to mypy or to pyright, both strict."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates

REPO = Path(__file__).parents[2]

PROGRAM = '''\
from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, assert_type

import forebay
from forebay import Cache, Codec, Entries, Entry, Lazy, Lease, Plan, ReadOptions, Samples, Stats


def double(key: str, data: bytes) -> list[int]:
    return [2 * byte for byte in data] + [len(key)]


class Texts:
    """A codec of the program's own."""

    name = "texts"

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, raw: memoryview) -> str:
        return bytes(raw).decode()


class Numbers:
    """Another one, without a name."""

    def encode(self, value: list[int]) -> bytes:
        return bytes(value)

    def decode(self, data: memoryview) -> list[int]:
        return list(data)


NUMBERS: Codec[list[int]] = Numbers()


def held(cache: Cache, url: str) -> Lease:
    return cache.local(url)


def loaded(cache: Cache, url: str, **options: Unpack[ReadOptions]) -> list[memoryview]:
    return cache.read_many([url], **options)


def stream(cache: Cache, keys: list[str]) -> Iterator[list[int]]:
    with cache.prefetcher("/data", decode=double) as pool:
        lazy: Lazy[list[int]] = pool.get_lazy(keys[0])
        assert_type(lazy.get(), list[int])
        assert_type(pool.put("text").get(), str)
        yield from pool.stream(keys)
    with cache.prefetcher("/data") as raw:
        assert_type(raw.get_lazy("a").get(), bytes)


def count(samples: Samples) -> int:
    return len(samples)


with Cache("/nvme/forebay", budget="500GB") as cache:
    with cache.directory("s3://bucket/model/") as path:
        assert_type(path, str)
    with held(cache, "s3://bucket/file") as path:
        assert_type(path, str)
    stats: Stats = cache.stats()
    plan: Plan = cache.plan(need="1GB")
    entries: Entries = cache.entries()
    listed: list[Entry] = list(entries)
    assert_type(cache.read("https://host/x"), memoryview)
    for misspelled in cache.open, cache.local:
        misspelled("https://host/x", refesh=True)  # type: ignore[call-arg]
    assert_type(loaded(cache, "https://host/x", refresh=True, etag="v1"), list[memoryview])
    assert_type(cache.samples("raw", 10).get(0), memoryview | None)
    assert_type(cache.samples("texts", 10, codec=Texts()).get_or_put(0, lambda: "text"), str)
    assert_type(cache.samples("numbers", 10, codec=NUMBERS).get(0), list[int] | None)
    count(cache.samples("raw", 10))
    tasks = cache.tasks("experiments")

    @tasks.cached(tag="features-{split}")
    def features(split: str) -> dict[str, float]:
        return {split: stats.hit_rate}

    assert_type(features("train"), dict[str, float])

try:
    print(forebay.__version__, plan, listed)
except forebay.errors.RemoteError as error:
    print(error)
'''


@pytest.mark.parametrize("command", [["mypy", "--strict", "--cache-dir", str(REPO / ".mypy_cache")], ["pyright"]], ids=lambda c: c[0])
def test_a_strict_program_passes(command: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "include": ["program.py"]}')
    if command == ["pyright"]:
        version = subprocess.run([sys.executable, "-m", "pyright", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        if not version.stdout.startswith("pyright "):  # its package has only what fetches it
            pytest.skip(f"pyright cannot be fetched here: {version.stderr[-200:]}")
    done = subprocess.run([sys.executable, "-m", *command, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
