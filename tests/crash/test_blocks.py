"""A process dies before the k-th change of a file while it reads blocks: for every k the next one finds the root sound, and reads on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

import forebay
from forebay._engine.store import Store
from forebay.testing import ScriptedServer
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB

NewScene = Callable[[int], Scene]
SIZE = 64 * KiB
BODY = os.urandom(9 * SIZE + 77)


@pytest.fixture
def url() -> Iterator[str]:
    with ScriptedServer() as server:
        yield server.put("/a.bin", BODY)


def nothing(store: Store) -> None:
    """An empty root."""


@pytest.mark.parametrize("room", [4 * MiB, 400 * KiB], ids=["ample", "short"])
def test_blocks_are_read(scene: NewScene, url: str, room: int) -> None:
    """One block, then several by one request. Where there is no room for all, some are evicted for others."""
    there = scene(room)

    def read(store: Store) -> None:
        with forebay.Cache(there.place) as cache, cache.open(url, block_size=SIZE) as file:
            file.seek(7 * SIZE)
            assert file.read(SIZE) == BODY[7 * SIZE : 8 * SIZE]
            file.seek(SIZE)
            assert file.read(5 * SIZE) == BODY[SIZE : 6 * SIZE]

    there.play(nothing, read, read, least=12, small_first=room > MiB)
