"""Keys, URLs and names of a subclass of str: they mean the text that they contain, whatever the methods of the subclass say."""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay import errors
from forebay._model import exact_str
from forebay.adapters.pfio import FileCache
from forebay.adapters.streaming.shared import Block
from forebay.checkpoint import Checkpoint
from forebay.remote import as_text
from forebay.sources import TarSource, UrlSource
from forebay.testing import ScriptedServer

MiB = 1 << 20
_KEPT = {"__class__", "__del__", "__delattr__", "__doc__", "__getattribute__", "__init__", "__init_subclass__", "__new__", "__setattr__"}


def _refuse(self: object, *arguments: Any, **options: Any) -> Any:
    raise AssertionError("a method of the subclass was called")


Liar: Any = type("Liar", (str,), {name: _refuse for name in dir(str) if name not in _KEPT | {"__subclasshook__"}})


class AnyCase(str):
    """A text that is equal to itself in other cases, as many programs have for the names of headers and columns."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


class Shown(str, enum.Enum):  # noqa: UP042  # whose `str` is another text
    KEY = "alpha"


class Value(enum.StrEnum):
    KEY = "alpha"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache
        assert cache.check() == []


@pytest.mark.parametrize("make", [Liar, AnyCase, np.str_, lambda text: Value.KEY, lambda text: Shown.KEY])
def test_the_text_is_exact(make: Callable[[str], str]) -> None:
    given = make("alpha")
    assert type(given) is not str
    for text in (exact_str(given), as_text(given)):
        assert type(text) is str
        assert text == "alpha"


def test_what_only_says_that_it_is_a_str_is_none() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            return str

    assert isinstance(Proxy(), str)
    assert exact_str(Proxy()) is exact_str(b"a") is exact_str(None) is None
    with pytest.raises(errors.ConfigError):
        as_text(Proxy())


def test_values_are_those_of_the_text(cache: forebay.Cache) -> None:
    cache.put("Beta", b"1")
    assert cache.put(AnyCase("beta"), b"2")
    for _ in range(4):  # by the index, by a statement, and as this process remembers it
        assert cache.get(AnyCase("Beta")) == cache["Beta"] == b"1"
        assert cache.get(AnyCase("beta")) == cache[AnyCase("beta")] == b"2"
        assert cache.get(AnyCase("BETA")) is None
        assert cache.get_or_put(AnyCase("Beta"), lambda: b"") == b"1"
    assert AnyCase("BETA") not in cache
    assert sorted(cache) == ["Beta", "beta"]


def test_a_key_of_a_caller_is_no_damage(cache: forebay.Cache) -> None:
    for value in (b"1", b"22", b"", b"x" * 100_000):
        for make in (AnyCase, str, np.str_):
            assert cache.put(make("Ab"), value)
        assert cache.check() == []
    entry = cache.entry("Ab")
    assert entry is not None
    assert cache.hold(entry._replace(key=AnyCase("Ab"), space=AnyCase("values"))).entry.key == "Ab"
    with pytest.raises(errors.NotCached):
        cache.hold(entry._replace(key=AnyCase("aB")))
    assert cache.stats().damaged == 0


@pytest.mark.parametrize("make", [np.str_, lambda text: Value.KEY, lambda text: Shown.KEY])
def test_usual_subclasses_work_as_their_text(cache: forebay.Cache, make: Callable[[str], str]) -> None:
    key = make("alpha")
    assert cache.put(key, b"1")
    assert [*cache] == ["alpha"]
    assert key in cache
    assert cache.get(key) == cache.get("alpha") == b"1"
    assert cache.entry(key) == cache.entry("alpha")
    assert cache.tasks("t").write(key, 1)
    assert cache.tasks("t").read("alpha") == (True, 1)
    cache.evict(key)
    assert not [*cache]


def test_urls_are_those_of_the_text(cache: forebay.Cache) -> None:
    with ScriptedServer() as server:
        upper, lower = server.put("/A", b"upper"), server.put("/a", b"lower")
        for _ in range(4):
            assert cache.read(AnyCase(upper)) == b"upper"
            assert cache.read(AnyCase(lower)) == b"lower"
            assert cache.read_many([AnyCase(upper), lower, AnyCase(lower)]) == [b"upper", b"lower", b"lower"]
        asked = len(server.requests)
        assert cache.read_many(np.array([upper, lower])) == [b"upper", b"lower"]  # as many programs keep their lists
        assert len(server.requests) == asked


class Located(os.PathLike[str]):
    def __init__(self, text: str) -> None:
        self._text = text

    def __fspath__(self) -> str:
        return AnyCase(self._text)

    def __eq__(self, other: object) -> bool:
        return AnyCase(self._text) == other

    def __hash__(self) -> int:
        return hash(AnyCase(self._text))


def test_an_object_that_names_a_path_is_no_key_itself(cache: forebay.Cache) -> None:
    with ScriptedServer() as server:
        upper, lower = server.put("/A", b"upper"), server.put("/a", b"lower")
        for _ in range(4):
            assert cache.read(lower) == b"lower"
            assert cache.read(Located(upper)) == b"upper"
            assert cache.read_many([lower, Located(upper)]) == [b"lower", b"upper"]


@pytest.fixture
def doors(cache: forebay.Cache, tmp_path: Path) -> Iterator[dict[str, Callable[[], object]]]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"a")
    source = type("Own", (), {"uri": "own:", "__getitem__": lambda self, key: key.encode()})()
    with ScriptedServer() as server:
        url, data = Liar(server.put("/a", b"a")), Liar(str(tmp_path / "data"))
        cache.read(str.__str__(url))
        with cache.prefetcher(source, name="own") as pool, cache.prefetcher(data, name="of-files") as files:
            key, array = Liar("a"), cache.samples(length=2)
            yield {
                "put": lambda: cache.put(key, b"1"),
                "get": lambda: [cache.get(key) for _ in range(3)],
                "index": lambda: cache.__getitem__(key),
                "in": lambda: key in cache,
                "get_or_put": lambda: cache.get_or_put(Liar("b"), lambda: b"1"),
                "space": lambda: cache.space(Liar("own-space"), policy=Liar("lru")).put(key, b"1"),
                "read": lambda: [cache.read(url) for _ in range(3)],
                "read_many": lambda: cache.read_many([url, url]),
                "open": lambda: cache.open(url).close(),
                "local": lambda: cache.local(url).close(),
                "local_many": lambda: cache.local_many([url]).close(),
                "pull": lambda: cache.pull(url),
                "warm": lambda: cache.warm([url]),
                "lookahead": lambda: list(cache.lookahead([url])),
                "entry": lambda: cache.entry(url),
                "pin": lambda: (cache.pin(url), cache.unpin(url)),
                "invalidate": lambda: cache.invalidate(url),
                "entries": lambda: len(cache.entries(Liar("urls"))),
                "clear": lambda: cache.clear(Liar("urls")),
                "directory": lambda: cache.directory(data, include=Liar("*"), exclude=[Liar("b")], force=True).close(),
                "copy_directory": lambda: cache.copy_directory(data, Liar(str(tmp_path / "copy"))),
                "lazy": lambda: pool.get_lazy(key).get(),
                "many": lambda: pool.get_many([key, Liar("b")]),
                "warm items": lambda: pool.warm([key]),
                "spill": lambda: pool.put(1, Liar("name")).get(),
                "files": lambda: [files.get_lazy(key).get(), *files.get_many([key])],
                "source": lambda: UrlSource(data)[key],
                "shards": lambda: TarSource(data),
                "samples": lambda: cache.samples(Liar("named"), 2, codec=Liar("raw"), fingerprint=Liar("f")).close(),
                "preserve": lambda: array.preserve(Liar("kept")),
                "tasks": lambda: cache.tasks(Liar("tasks"), codec=Liar("json")).write(key, 1),
                "tag": lambda: cache.tasks("tagged").cached(lambda x: x, tag=Liar("of-{x}"), version=Liar("1"), ignore=Liar("x"))(1),
                "tags": lambda: cache.tasks("computed").cached(lambda x: x, tag=lambda x: Liar("of-x"))(1),
                "checkpoint": lambda: Checkpoint(data, cache=cache),
                "root": lambda: forebay.Cache(Liar(str(tmp_path / "other")), upstream=Liar(str(cache.path))).close(),
                "options": lambda: forebay.RemoteOptions(headers={AnyCase("X-A"): Liar("b")}, token=Liar("t"), partition=Liar("p")),
            }


def test_no_door_calls_a_method_of_the_subclass(doors: dict[str, Callable[[], object]]) -> None:
    for name, door in doors.items():
        try:
            door()
        except AssertionError as error:
            raise AssertionError(name) from error


def test_names_of_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    with forebay.claim(Liar(str(tmp_path / "dir")), Liar("s3://b/x"), job=Liar("job"), name=Liar("name")) as claim:
        one = claim.array(AnyCase("Data"), 2, "int32")
        other = claim.array(AnyCase("data"), 2, "int32")
        one[0] = 1
        assert other[0] == 0
        assert pickle.loads(pickle.dumps(claim.barrier(Liar("b")))).wait(1, timeout=5) == 0
        with claim.lock(Liar("lock")):
            pass
        claim.scalar(Liar("one"), "int32").set(1)
        assert len(claim.buffer(Liar("bytes"), 8)) == 8


@pytest.mark.parametrize("key", [b"alpha", 7, None, ["a"], Path("alpha")])
def test_what_is_no_str_is_no_key(cache: forebay.Cache, key: Any) -> None:
    for call in (cache.get, cache.__getitem__, lambda key: cache.put(key, b""), lambda key: cache.get_or_put(key, lambda: b"")):
        with pytest.raises(errors.ConfigError):
            call(key)
    if not isinstance(key, Path):
        with pytest.raises(errors.ConfigError):
            cache.read(key)
        with pytest.raises(errors.ConfigError):
            cache.read_many([key])


def test_names_of_adapters(tmp_path: Path) -> None:
    directory = Liar(str(tmp_path / "pfio"))
    with FileCache(2, dir=directory) as slots:
        slots.put(0, b"0")
        slots.put(1, b"1")
        assert slots.preserve(Liar("kept"))
    with FileCache(2, dir=directory) as slots:
        assert slots.preload(Liar("kept"))
        assert slots.get(1) == b"1"
    block = Block.create(Liar(f"forebay-{os.getpid()}-liar"), 8)
    try:
        assert type(block.name) is str
        assert Block.attach(block.name).size == 8
    finally:
        block.unlink()
        block.close()
