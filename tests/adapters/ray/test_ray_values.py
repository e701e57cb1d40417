"""What a node other than the head's sees of its values, the head being in the same process: no Ray runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("numpy")

import numpy as np

import forebay
from forebay import errors
from forebay.adapters.ray.values import AT_ONCE, HeadValues, Payload, RemoteValues, Unreachable

LARGE = np.arange(AT_ONCE, dtype="u2")


class Head:
    """Asked, it counts; ``before``: what happens first; ``fault``: what it raises instead."""

    def __init__(self, served: HeadValues) -> None:
        self.served, self.asked = served, list[str]()
        self.before: Callable[[str], None] = lambda method: None
        self.fault: Exception | None = None

    def ask(self, method: str, *args: Any, size: int = 0) -> Any:
        self.asked.append(method)
        self.before(method)
        if self.fault is not None:
            raise self.fault
        sent = pickle.loads(pickle.dumps(args, 5))
        return pickle.loads(pickle.dumps(getattr(self.served, method)(*sent), 5))


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[tuple[forebay.Cache, forebay.Cache]]:
    with (
        forebay.Cache(tmp_path / "head", budget=64 << 20, min_free=0) as head,
        forebay.Cache(tmp_path / "away", budget=64 << 20, min_free=0) as away,
    ):
        yield head, away
        assert head.check(deep=True) == away.check(deep=True) == []


@pytest.fixture
def head(caches: tuple[forebay.Cache, forebay.Cache]) -> Head:
    tasks = caches[0].tasks("ray", budget="16MiB")
    return Head(HeadValues(tasks._values.fetcher, "ray", tasks._values.codec))


@pytest.fixture
def away(caches: tuple[forebay.Cache, forebay.Cache], head: Head) -> RemoteValues:
    return away_in(caches[1], head)


def away_in(cache: forebay.Cache, head: Head) -> RemoteValues:
    plain = cache.tasks("copies")._values
    return RemoteValues(plain.fetcher, "copies", plain.codec, head.ask)


def test_small_values_come_with_the_answer_and_large_ones_once(head: Head, away: RemoteValues) -> None:
    head.served.keep("small", [1])
    head.served.keep("large", LARGE)
    assert [away.look("small") for _ in range(2)] == [([1],)] * 2
    assert head.asked == ["give", "give"]
    head.asked.clear()
    for _ in range(2):
        found = away.look("large")
        assert found is not None
        assert np.array_equal(found[0], LARGE)
    assert head.asked == ["give", "send", "give"]
    assert (away.counted["hits"], away.counted["misses"]) == (4, 0)


def test_what_is_kept_here_is_at_the_head_and_stays_here(head: Head, away: RemoteValues) -> None:
    assert away.keep("a", LARGE, digest="0" * 32, pin=True)
    assert head.served.look("a", "0" * 32) is not None
    head.asked.clear()
    assert away.look("a", "0" * 32) is not None
    assert head.asked == ["give"]
    assert (away.has("a"), away.keys(), away.size()[0] > LARGE.nbytes, away.budget()) == (True, ["a"], True, 16 << 20)
    assert away.flush() == 0
    assert away.evict("a")
    assert away.look("a") is None


def test_another_call_s_output_is_not_taken(head: Head, away: RemoteValues, caplog: pytest.LogCaptureFixture) -> None:
    head.served.keep("tag", "theirs", digest="a" * 32)
    assert [away.look("tag", "b" * 32) for _ in range(2)] == [None, None]
    assert caplog.text.count("different arguments") == 1
    assert away.look("tag", "a" * 32) == away.look("tag") == ("theirs",)


def test_nor_that_of_a_copy_which_another_process_just_made(head: Head, away: RemoteValues, caches: Any) -> None:
    """P1 gets the old value / P2 the new one, which it copies / P1 copies, and looks at what is there."""
    head.served.keep("tag", LARGE, digest="a" * 32)
    store = away.fetcher.store
    put = store.put_pieces

    def then_another(space: str, key: str, pieces: Any, **how: Any) -> Any:
        put(space, key, pieces, **how)
        return put(space, key, away.codec.encode("other"), meta=f"1-2 pickle {'b' * 32}")

    store.put_pieces = then_another
    try:
        found = away.look("tag", "a" * 32)
    finally:
        store.put_pieces = put
    assert found is not None
    assert np.array_equal(found[0], LARGE)


def test_a_value_that_was_replaced_between_two_requests(head: Head, away: RemoteValues) -> None:
    head.served.keep("a", LARGE)
    head.before = lambda method: method == "send" and head.served.keep("a", LARGE + 1)
    assert away.look("a") is None  # gone since
    head.before = lambda method: None
    found = away.look("a")
    assert found is not None
    assert np.array_equal(found[0], LARGE + 1)


@pytest.mark.parametrize("fault", [Unreachable, errors.CacheFault])
def test_with_a_head_that_fails_functions_run(head: Head, away: RemoteValues, fault: type[Exception]) -> None:
    assert away.keep("a", 1)
    head.fault = fault("as was agreed")
    assert away.look("a") is None
    assert away.keep("b", 1) is False
    assert [away.single("b", None, lambda: 2), away.single("b", None, lambda: 3)] == [2, 3]
    head.fault = None
    assert away.look("a") == (1,)
    with pytest.raises(LookupError, match="mine"):
        away.single("c", None, fails)


def fails() -> None:
    raise LookupError("mine")


def test_without_a_head_the_rest_is_empty(head: Head, away: RemoteValues) -> None:
    away.keep("a", 1)
    head.fault = Unreachable()
    assert (away.has("a"), away.keys(), away.size(), away.budget(), away.evict("a"), away.flush()) == (False, [], (0, 0), None, False, 0)


def test_a_node_without_a_cache_reads_all_the_same(head: Head) -> None:
    away = away_in(forebay.Cache(enabled=False), head)
    assert away.keep("a", LARGE)
    for _ in range(2):
        found = away.look("a")
        assert found is not None
        assert np.array_equal(found[0], LARGE)
    assert away.single("b", "c" * 32, lambda: 7) == 7
    assert head.served.look("b", "c" * 32) == (7,)


def test_what_is_too_large_for_the_head_is_told_once(head: Head, away: RemoteValues, caplog: pytest.LogCaptureFixture) -> None:
    away.keep("a", "old")
    for _ in range(2):
        assert away.keep("a", np.zeros(20 << 20, "u1"), label="f") is False
    assert caplog.text.count("the output of f is not stored") == 1
    assert away.counted["store_failures"] == 2
    assert away.look("a") == ("old",)
    assert away.keep("b", (i for i in range(3))) is False


class Here:
    """Goes away with the program."""


def test_a_value_whose_class_is_not_there_stays(head: Head, away: RemoteValues, monkeypatch: pytest.MonkeyPatch) -> None:
    head.served.keep("a", Here())
    monkeypatch.delattr(f"{__name__}.Here")
    assert away.look("a") is None
    assert head.served.has("a")


def test_tokens_of_a_root_that_was_made_anew_are_others(tmp_path: Path) -> None:
    """Whose entries may have the same ids. No token tells the secret of its root."""
    tokens = set()
    for name in ("one", "anew"):
        with forebay.Cache(tmp_path / name, budget=64 << 20, min_free=0) as cache:
            values = cache.tasks("ray")._values
            served = HeadValues(values.fetcher, "ray", values.codec)
            served.keep("a", 1)
            token = served.give("a", "pickle", False, "").token  # type: ignore[union-attr]
            assert f"{values.fetcher.store.root.id:x}" not in token
            tokens.add(token.partition("-")[0])
    assert len(tokens) == 2


def test_payloads_pickle_beside_the_pickle() -> None:
    beside: list[Any] = []
    stream = pickle.dumps(Payload([b"abc", b"", memoryview(LARGE)]), 5, buffer_callback=beside.append)
    assert (len(stream) < 300, len(beside)) == (True, 3)
    assert b"".join(pickle.loads(stream, buffers=beside).pieces) == b"abc" + LARGE.tobytes()
