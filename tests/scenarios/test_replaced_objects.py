"""Objects that are replaced on nginx while they are read in parts: what is read is of one version, or it is an error."""

from __future__ import annotations

import io
import random
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.sources import TarSource
from tests.harness import MiB
from tests.processes import Line, talk_to
from tests.servers.nginx import Nginx
from tests.servers.nginx import nginx as running

MEMBERS = 30
BLOCK = 100_000


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with running(tmp_path_factory.mktemp("nginx") / "server") as server:
        yield server


@pytest.fixture
def cache(root: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(root, budget=64 * MiB, min_free=0, max_age=0) as cache:
        yield cache


# -- members of shards -------------------------------------------------------------------------------------------------


def member(version: int, number: int, size: int) -> bytes:
    return random.Random(f"{version} {number}").randbytes(size + 700 * (version % 3))


def shard(version: int, size: int) -> bytes:
    """Each version has its members at other places, with other bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        numbers = list(range(MEMBERS))
        random.Random(version).shuffle(numbers)
        for number in numbers:
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = len(body := member(version, number, size))
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


SIZES = pytest.mark.parametrize("size", [2_000, 1_200_000], ids=["kept whole", "read by ranges"])


@SIZES
def test_a_shard_that_is_replaced_behind_its_index_is_read_in_its_new_version(cache: forebay.Cache, nginx: Nginx, size: int) -> None:
    name = f"behind-{size}.tar"
    source = TarSource(nginx.put(name, shard(0, size)))
    with cache.prefetcher(source) as pool:  # binds the source
        assert pool.get_lazy(f"{name}/0.bin").get() == member(0, 0, size)
        nginx.replace(name, shard(1, size))
        assert source[f"{name}/1.bin"] == member(1, 1, size)
        assert [source[f"{name}/{number}.bin"] for number in range(4)] == [member(1, number, size) for number in range(4)]


@pytest.mark.rotates
@SIZES
def test_a_shard_that_is_replaced_again_and_again_mixes_no_versions(cache: forebay.Cache, nginx: Nginx, size: int) -> None:
    """A process replaces it while another one reads: each member is of one of the versions, and of no older one than the one before."""
    name, versions = f"again-{size}.tar", 6
    bodies = [shard(version, size) for version in range(versions)]
    expected = [{member(version, number, size): version for version in range(versions)} for number in range(MEMBERS)]

    def replacing(line: Line) -> None:
        for body in bodies[1:]:
            nginx.replace(name, body)
            line.say("replaced")
            line.hear()

    url, newest, seen = nginx.put(name, bodies[0]), 0, set[int]()
    chance = random.Random(1)
    with cache.prefetcher(TarSource(url)) as pool, talk_to(replacing) as other:
        for turn in range(60):
            number = chance.randrange(MEMBERS)
            version = expected[number].get(bytes(pool.source[f"{name}/{number}.bin"]))
            assert version is not None, "a mixture of versions"
            assert version >= newest
            newest = version
            seen.add(version)
            if turn % 10 == 9 and turn < 10 * (versions - 1):
                other.hear()
                other.say()
        other.result()
    assert newest == versions - 1
    assert len(seen) > 2


# -- blocks ------------------------------------------------------------------------------------------------------------


def content(version: int) -> bytes:
    return random.Random(version).randbytes(12 * BLOCK + 17 * version)


def part(body: bytes, first: int, count: int = 1) -> bytes:
    return body[first * BLOCK : (first + count) * BLOCK]


@pytest.mark.parametrize("is_as_long", [True, False], ids=["as long", "longer"])
def test_a_file_that_is_replaced_between_two_blocks_is_read_in_the_version_that_was_opened(
    cache: forebay.Cache, nginx: Nginx, is_as_long: bool
) -> None:
    name = f"blocks-{is_as_long}.bin"
    old, new = content(0), content(1)[: 12 * BLOCK if is_as_long else None]
    url = nginx.put(name, old)
    with cache.open(url, block_size=BLOCK) as file:
        assert file.read(2 * BLOCK) == part(old, 0, 2)
        nginx.replace(name, new)
        for first, count in ((4, 1), (1, 3), (0, 12)):
            file.seek(first * BLOCK)
            with pytest.raises(errors.RemoteChanged):
                file.read(count * BLOCK)
        file.seek(0)
        assert file.read(2 * BLOCK) == part(old, 0, 2)  # what is cached is still of the version that was opened
        with cache.open(url, block_size=BLOCK) as again:
            assert again.read() == new
        file.seek(4 * BLOCK)
        with pytest.raises(errors.RemoteChanged):
            file.read(1)


def test_a_sequential_reader_that_is_read_ahead_of_meets_the_change(cache: forebay.Cache, nginx: Nginx) -> None:
    old = content(0)
    url = nginx.put("sequential.bin", old)
    with cache.open(url, block_size=BLOCK) as file:
        done = b""
        with pytest.raises(errors.RemoteChanged):
            while data := file.read(BLOCK // 2):
                done += data
                if len(done) == 8 * BLOCK:
                    nginx.replace("sequential.bin", content(1))
        assert old.startswith(done)
        assert len(done) >= 8 * BLOCK
    with cache.open(url, block_size=BLOCK) as file:
        assert file.read() == content(1)


def test_readers_of_a_file_that_is_replaced_again_and_again_see_one_version_each(cache: forebay.Cache, nginx: Nginx) -> None:
    versions = [content(version) for version in range(8)]
    url, over, faults = nginx.put("often.bin", versions[0]), threading.Event(), list[BaseException]()
    whole = 0

    def replace() -> None:
        try:
            for body in versions[1:]:
                nginx.replace("often.bin", body)
                cache.read(f"{nginx.url}/often.bin")
        except BaseException as error:
            faults.append(error)
        finally:
            over.set()

    replacing = threading.Thread(target=replace)
    replacing.start()
    while not over.is_set() or not whole:
        parts = list[tuple[int, bytes]]()
        try:
            with cache.open(url, block_size=BLOCK) as file:
                for number in (7, 0, 11, 3):
                    file.seek(number * BLOCK)
                    parts.append((number, file.read(BLOCK)))
            whole += 1
        except errors.RemoteChanged:
            pass
        assert any(all(part(body, number) == data for number, data in parts) for body in versions), "a mixture of versions"
    replacing.join()
    assert faults == []
