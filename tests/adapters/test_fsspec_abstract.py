"""fsspec's own tests of filesystems, over a local directory and over fsspec's memory, both behind the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("fsspec.implementations.chained")

from fsspec.tests import abstract  # noqa: E402

import forebay  # noqa: E402

numbers = itertools.count()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path_factory.mktemp("cache") / "root", budget="100MB", min_free=0) as cache:
        yield cache


class Fixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        (tmp_path / "local").mkdir()
        return str(tmp_path / "local")


class LocalFixtures(Fixtures):
    @pytest.fixture
    def fs(self, cache: forebay.Cache) -> Any:
        return fsspec.filesystem("forebay", target_protocol="file", target_options={"auto_mkdir": True}, cache=cache, force=True)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        (tmp_path / "remote").mkdir()
        return str(tmp_path / "remote")


class MemoryFixtures(Fixtures):
    @pytest.fixture
    def fs(self, cache: forebay.Cache) -> Any:
        return fsspec.filesystem("forebay", target_protocol="memory", cache=cache)

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return f"/test-{next(numbers)}"  # what another test has left there would be in the cache


class TestLocalCopy(abstract.AbstractCopyTests, LocalFixtures): ...  # type: ignore[misc]


class TestLocalGet(abstract.AbstractGetTests, LocalFixtures): ...  # type: ignore[misc]


class TestLocalPut(abstract.AbstractPutTests, LocalFixtures): ...  # type: ignore[misc]


class TestLocalOpen(abstract.AbstractOpenTests, LocalFixtures): ...  # type: ignore[misc]


class TestLocalPipe(abstract.AbstractPipeTests, LocalFixtures): ...  # type: ignore[misc]


class TestMemoryCopy(abstract.AbstractCopyTests, MemoryFixtures): ...  # type: ignore[misc]


class TestMemoryGet(abstract.AbstractGetTests, MemoryFixtures): ...  # type: ignore[misc]


class TestMemoryPut(abstract.AbstractPutTests, MemoryFixtures): ...  # type: ignore[misc]


class TestMemoryOpen(abstract.AbstractOpenTests, MemoryFixtures): ...  # type: ignore[misc]


class TestMemoryPipe(abstract.AbstractPipeTests, MemoryFixtures): ...  # type: ignore[misc]


def test_the_suite_is_whole() -> None:
    known = {"AbstractCopyTests", "AbstractGetTests", "AbstractOpenTests", "AbstractPipeTests", "AbstractPutTests"}
    assert {name for name in vars(abstract) if name.startswith("Abstract") and name.endswith("Tests")} == known
