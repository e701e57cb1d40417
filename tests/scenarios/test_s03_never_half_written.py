"""Scenario 3: half-written or damaged entries are never served; they are set aside and fetched again."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts

MiB = 1 << 20
KEYS = 24


@functools.cache
def versions(key: int) -> list[bytes]:
    """What may stand under a key: small values, blobs, blobs of several MiB; three versions of each."""
    size = [300, 15_000, 40_000, MiB, 3 * MiB][key % 5]
    return [random.Random(f"{key} {version}").randbytes(size + version) for version in range(3)]


def write_for_ever(root: Path, seed: int, urls: list[str], begun: Any) -> None:
    choose = random.Random(seed)
    known = [versions(key) for key in range(KEYS)]
    with forebay.Cache(root, budget=30 << 20) as cache:
        begun.set()
        while True:
            key = choose.randrange(KEYS)
            cache.put(str(key), known[key][choose.randrange(3)])
            if choose.random() < 0.2:
                cache.read(choose.choice(urls), refresh=choose.random() < 0.2)
            if choose.random() < 0.1:
                cache.evict(f"values:{key}") if cache.entry(f"values:{key}") else None


@pytest.mark.rotates
@pytest.mark.parametrize("kills", [40, pytest.param(parts.share(500), marks=[pytest.mark.stress, pytest.mark.timeout(1200)])])
def test_s03_a_writer_killed_at_random_points(
    kills: int, root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any]
) -> None:
    bodies = {server.put(f"/{i}.bin", random.Random(i).randbytes(2 * MiB + i)): i for i in range(4)}
    assert all(versions(key) for key in range(KEYS))  # made once, here: the children inherit them
    found_some = 0
    for kill in range(kills):
        begun = flag()
        writers = [children(lambda seed=kill * 2 + i: write_for_ever(root, seed, list(bodies), begun)) for i in range(2)]  # noqa: B023
        assert begun.wait(60)
        time.sleep(random.random() * 0.08)
        for writer in writers:
            writer.kill()
        if kill % 8 and kill != kills - 1:
            continue
        with forebay.Cache(root) as cache:
            for key in range(KEYS):
                found = cache.get(str(key))
                found_some += found is not None
                assert found is None or bytes(found) in versions(key)
            assert cache.check(deep=True) == []
            assert cache.stats().damaged == 0
    assert found_some
    with forebay.Cache(root) as cache:
        for url, i in bodies.items():
            assert cache.read(url) == random.Random(i).randbytes(2 * MiB + i)


def blob(cache: forebay.Cache, url: str) -> Path:
    with cache.local(url) as path:
        return Path(path)


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("size", [100_000, 3 * MiB])
@pytest.mark.parametrize("how", ["read", "open", "local"])
def test_s03_a_truncated_file_is_caught_on_read_and_fetched_again(
    root: Path, server: ScriptedServer, children: Callable[..., Any], how: str, size: int
) -> None:
    body = os.urandom(size)
    url = server.put("/x.bin", body)

    def damage() -> None:
        with forebay.Cache(root) as cache:
            cache.read(url)
            path = blob(cache, url)
        path.chmod(0o644)
        os.truncate(path, size - 1)

    children(damage).result()
    with forebay.Cache(root) as cache:
        if how == "read":
            assert cache.read(url) == body
        elif how == "open":
            with cache.open(url) as file:
                assert file.read() == body
        else:
            with cache.local(url) as found:
                assert Path(found).read_bytes() == body
        assert cache.stats().damaged == 1
    assert server.gets == 2


def test_s03_a_flipped_byte_is_caught_at_the_first_use(
    root: Path, server: ScriptedServer, children: Callable[..., Any], warnings: Any
) -> None:
    body = os.urandom(500_000)
    url = server.put("/x.bin", body)

    def damage() -> None:
        with forebay.Cache(root) as cache:
            cache.read(url)
            flip(blob(cache, url), 123_456)

    children(damage).result()
    with warnings() as said, forebay.Cache(root) as cache:
        assert cache.read(url) == body
        assert cache.stats().damaged == 1
    assert [url in line for line in said] == [True]
    assert server.gets == 2


def test_s03_verify_catches_a_flipped_byte_of_a_large_entry(
    root: Path, server: ScriptedServer, children: Callable[..., Any], command: Callable[..., Any]
) -> None:
    body = os.urandom(3 * MiB)
    url, other = server.put("/x.bin", body), server.put("/y.bin", body)

    def damage() -> None:
        with forebay.Cache(root) as cache:
            cache.read(url)
            cache.read(other)
            flip(blob(cache, url), 2 * MiB)

    children(damage).result()
    found = command("verify", "--root", root, "--json")
    assert found.returncode == 1
    assert [problem["key"] for problem in json.loads(found.stdout)["problems"]] == [url]
    mended = command("verify", "--root", root, "--repair")
    assert mended.returncode == 0, mended.stderr
    assert command("verify", "--root", root).returncode == 0
    with forebay.Cache(root) as cache:
        assert cache.entry(other) is not None
        assert cache.read(url) == body
    assert server.gets == 3


@pytest.mark.parametrize("cuts", [2, 1 << 60])
def test_s03_a_body_that_is_cut_short_is_never_kept(root: Path, server: ScriptedServer, cuts: int) -> None:
    body = os.urandom(400_000)
    url = server.put("/x.bin", body, cut_after=100_000, cuts=cuts, etag=None, modified=None)
    options = forebay.RemoteOptions(attempts=4, backoff=0.01)
    with forebay.Cache(root, remote_options=options) as cache:
        if cuts == 2:
            assert cache.read(url) == body
        else:
            with pytest.raises(forebay.errors.RemoteUnavailable):
                cache.read(url)
            assert cache.entries() == []
            assert cache.stats().bytes_reserved == 0


def test_s03_two_versions_are_never_mixed_where_the_server_has_no_validators(root: Path, server: ScriptedServer) -> None:
    old, new = os.urandom(400_000), os.urandom(400_000)
    url = server.put("/x.bin", old, cut_after=100_000, cuts=1, etag=None, modified=None)

    def replace(request: Any) -> None:
        if server.gets == 2:
            server.objects["/x.bin"].body = new

    server.on_request = replace
    with forebay.Cache(root, remote_options=forebay.RemoteOptions(backoff=0.01)) as cache:
        assert cache.read(url) == new
