"""Which calls are replayed, by what, and what is asked in which order."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.tasks import Tasks
from forebay.tasks.config import Bypass, load
from forebay.tasks.naming import Tag


def made(**functions: Any) -> Bypass:
    return Bypass(load({"bypass": functions}))


def provider(tag: str | None, data_path: str | None, *args: Any, **kwargs: Any) -> Any:
    return tag, data_path, args, kwargs


def never(*args: Any, **kwargs: Any) -> bool:
    raise AssertionError("asked before the others")


def test_what_is_not_listed_runs() -> None:
    for replays in (Bypass(), Bypass(load({})), made(f=False), made(f={"bypass": False, "data": "x"}), made(g=True)):
        replays.set_provider("f", provider)
        replays.set_condition("f", never)
        assert replays.choose("f", Tag("a")) is None
        assert not replays.concerns("f")


def test_the_provider_gets_tag_data_and_arguments() -> None:
    replays = made(f={"bypass": True, "data": "some/path"})
    replays.set_provider("f", provider)
    replay = replays.choose("f", Tag("a", "m.f:a"), (1,), {"b": 2})
    assert replay is not None
    tag, *rest = replay(1, b=2)
    assert (tag, tag.key) == ("a", "m.f:a")
    assert rest == ["some/path", (1,), {"b": 2}]
    assert replays.concerns("f")


def test_a_file_alone_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recorded.txt").write_text("é\n", encoding="utf-8")
    replay = made(f={"bypass": True, "data": "recorded.txt"}).choose("f", None)
    assert replay is not None
    assert replay(1, 2, c=3) == "é\n"
    gone = made(f={"bypass": True, "data": "gone.txt"}).choose("f", None)
    assert gone is not None
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        gone()


def test_with_neither_it_runs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    replays = made(f=True, g=True)
    with caplog.at_level(logging.WARNING, "forebay.tasks"):
        assert [replays.choose("f", Tag("a")) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == ["f is to be bypassed, but has neither a provider nor data: it runs"]


def test_tags_are_asked_before_the_condition() -> None:
    replays = made(f={"bypass": True, "tags": ["iter-[0-3]"]})
    replays.set_provider("f", provider)
    replays.set_condition("f", never)
    for tag in (None, "iter-4", "iter-33", Tag("iter-1", given=False)):
        assert replays.choose("f", tag) is None
    replays.set_condition("f", lambda tag, data_path, *args, **kwargs: True)
    assert replays.choose("f", Tag("iter-1")) is not None


def test_the_condition_decides_last() -> None:
    asked: list[Any] = []

    def is_even(tag: str | None, data_path: str | None, n: int, *, other: int = 0) -> bool:
        asked.append((tag, data_path, n, other))
        return n % 2 == 0

    replays = made(f={"bypass": True, "data": "p"})
    replays.set_condition("f", is_even)
    assert replays.choose("f", Tag("a"), (1,)) is None
    assert replays.choose("f", None, (2,), {"other": 3}) is not None
    assert asked == [("a", "p", 1, 0), (None, "p", 2, 3)]


def test_what_a_condition_raises_reaches_the_caller() -> None:
    replays = made(f=True)
    replays.set_provider("f", provider)
    replays.set_condition("f", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        replays.choose("f", Tag("a"))


def test_only_functions_are_taken() -> None:
    with pytest.raises(errors.ConfigError, match="the provider of 'f' is not a function"):
        Bypass().set_provider("f", 3)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="the condition of 'f' is not a function"):
        Bypass().set_condition("f", None)  # type: ignore[arg-type]


def test_a_bypass_can_be_pickled() -> None:
    replays = made(f={"bypass": True, "data": "p", "tags": "a"})
    replays.set_provider("f", provider)
    arrived = pickle.loads(pickle.dumps(replays))
    replay = arrived.choose("f", Tag("a"))
    assert replay(5) == ("a", "p", (5,), {})


class Values(dict[str, Any]):
    """What `Tasks.from_cache` and `Tasks.if_cached` ask."""

    def read(self, tag: str) -> tuple[bool, Any]:
        key = getattr(tag, "key", tag)
        return key in self, self.get(key)

    def has(self, tag: str) -> bool:
        return getattr(tag, "key", tag) in self

    from_cache: Any = Tasks.from_cache
    if_cached: Any = Tasks.if_cached


def test_what_the_cache_has() -> None:
    values = Values({"m.f:a": None})
    assert values.from_cache(Tag("a", "m.f:a"), None, 1, b=2) is None
    assert values.if_cached(Tag("a", "m.f:a"), None, 1, b=2)
    for tag in (Tag("b", "m.f:b"), None):
        assert not values.if_cached(tag)
        with pytest.raises(errors.NotCached, match="b" if tag else "None"):
            values.from_cache(tag)


def test_what_comes_from_the_cache_is_known() -> None:
    replays, values = made(f=True, g=True), Values()
    replays.set_provider("f", values.from_cache)
    replays.set_provider("g", provider)
    from_cache, other = replays.choose("f", None), replays.choose("g", None)
    assert from_cache is not None
    assert other is not None
    assert (from_cache.is_from_cache, other.is_from_cache) == (True, False)
