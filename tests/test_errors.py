"""Errors go from one process to another: with their message, their facts, what led to them, and whatever their class."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.errors import ForebayError
from forebay.tasks.config import NoConfig
from tests.processes import raise_it

FACTS: dict[str, Any] = {"key": "k", "path": "/p", "url": "https://host/x", "need": 5, "names": ["a", "b"], "at_hand": None}
Way = Callable[[BaseException], BaseException]
WAYS: dict[str, Way] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),  # type: ignore[no-any-return]
    "pickle 2": lambda error: pickle.loads(pickle.dumps(error, 2)),  # type: ignore[no-any-return]
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def import_everything() -> None:
    """All rooms but the adapters', which bring frameworks: a process that has them forks ten times as slowly."""
    above = Path(forebay.__path__[0])
    for path in above.rglob("*.py"):
        parts = path.relative_to(above).with_suffix("").parts
        if parts[0] != "adapters" and parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(("forebay", *parts)))


def classes_below(cls: type[ForebayError]) -> Iterator[type[ForebayError]]:
    yield cls
    for below in cls.__subclasses__():
        if below.__module__.startswith("forebay."):
            yield from classes_below(below)


import_everything()
CLASSES = sorted(set(classes_below(ForebayError)), key=lambda cls: (cls.__module__, cls.__qualname__))


def test_all_are_found() -> None:
    assert {NoConfig, errors.Incomplete, errors.NoSpace} < set(CLASSES)
    assert any(cls.__module__ != "forebay.errors" for cls in CLASSES)


def test_adapters_have_no_errors_of_their_own() -> None:
    """One that had would have to be imported above."""
    names = {cls.__name__ for cls in CLASSES}
    found = []
    for path in (Path(forebay.__path__[0]) / "adapters").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and names & {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
                found.append(f"{path.name}: {node.name}")
    assert found == []


def led_to(error: BaseException) -> BaseException:
    """The error, with a cause that has one itself, a fact that nobody has declared, and a note."""
    try:
        try:
            try:
                raise OSError(5, "the disk is broken", "/dev/x")
            except OSError as first:
                raise errors.CacheFault("the cache failed", key="k") from first
        except errors.CacheFault as second:
            raise error from second
    except BaseException as raised:
        raised.add_note("look at the disk")
        raised.seen_by = "me"  # type: ignore[attr-defined]
        return raised


def assert_same(found: BaseException, error: BaseException) -> None:
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "facts", None) == getattr(error, "facts", None)
    assert {name: getattr(found, name) for name in FACTS} == FACTS
    assert found.seen_by == "me"  # type: ignore[attr-defined]
    assert found.__notes__ == ["look at the disk"]
    assert getattr(found, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize("way", WAYS)
def test_every_error_arrives_as_it_was(way: str) -> None:
    for cls in CLASSES:
        error = led_to(cls("what was wanted, found, and to be done", **FACTS))
        found = WAYS[way](error)
        assert_same(found, error)
        assert repr(found) == repr(error)
        cause = found.__cause__
        assert type(cause) is errors.CacheFault
        assert (str(cause), cause.facts) == ("the cache failed", {"key": "k"})
        assert type(cause.__cause__) is OSError
        assert cause.__cause__.errno == 5
        assert_same(WAYS[way](found), error)  # and once more
        if cls.__module__ == errors.__name__:
            assert type(WAYS[way](cls())) is cls


def test_an_error_without_a_story_has_none() -> None:
    found = pickle.loads(pickle.dumps(errors.Damaged("x", key="k")))
    assert (found.__cause__, found.__context__, getattr(found, "__notes__", [])) == (None, None, [])


class NeedsMore(Exception):
    """One of those whose pickle cannot be read."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class HasALock(Exception):
    """One of those that cannot be pickled at all."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = multiprocessing.get_context("fork").Lock()


@pytest.mark.parametrize("cause", [NeedsMore(1, 2), HasALock()], ids=lambda cause: type(cause).__name__)
def test_of_a_cause_that_cannot_travel_class_and_text_arrive(cause: Exception) -> None:
    error = errors.CacheFault("failed", key="k")
    error.__cause__ = cause
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is errors.CacheFault
    assert type(found.__cause__) is errors.RemoteCause
    assert type(cause).__name__ in str(found.__cause__)
    assert str(cause) in str(found.__cause__)


def test_a_fact_that_cannot_travel_arrives_as_text() -> None:
    found = pickle.loads(pickle.dumps(errors.CacheFault("failed", key=lambda: 1)))
    assert "lambda" in found.key


def test_a_fact_that_does_not_come_back_arrives_as_text() -> None:
    found = pickle.loads(pickle.dumps(errors.CacheFault("failed", key=NeedsMore(1, 2))))
    assert found.key == "NeedsMore('1 and 2')"


ELSEWHERE = """
import pickle, sys
from forebay import errors
class Own(Exception): pass
cause = Own("its own")
cause.__cause__ = ValueError("before")
cause.add_note("a note")
error = errors.CacheFault("failed", key="k")
error.__cause__ = cause
sys.stdout.buffer.write(pickle.dumps([error, "and more"]))
"""


def test_a_cause_of_another_program_arrives_as_text() -> None:
    """Its class is in that one's `__main__`: what cannot be read would take all that is in the same pickle with it."""
    data = subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, stdout=subprocess.PIPE).stdout
    found, more = pickle.loads(data)
    assert (str(found), more) == ("failed", "and more")
    assert type(found.__cause__) is errors.RemoteCause
    assert str(found.__cause__) == "__main__.Own: its own"
    assert repr(found.__cause__.__cause__) == "ValueError('before')"
    assert found.__cause__.__notes__ == ["a note"]


@pytest.mark.parametrize("way", WAYS)
def test_notes_of_a_cause_arrive_once(way: str) -> None:
    error, cause = errors.CacheFault("failed"), ValueError("before")
    cause.add_note("a note")
    error.__cause__ = cause
    found = WAYS[way](WAYS[way](error))
    assert (type(found.__cause__), found.__cause__.__notes__) == (ValueError, ["a note"])  # type: ignore[union-attr]


def test_a_missing_extra_is_quoted_for_the_shell() -> None:
    assert str(errors.MissingExtra.of("it", "ray")).endswith("pip install 'ray[train]'")
    assert str(errors.MissingExtra.of("it", "tasks")).endswith("pip install cloudpickle PyYAML")


def test_errors_in_a_ring_arrive() -> None:
    first, second = errors.CacheFault("first"), errors.NoSpace("second")
    first.__cause__, second.__cause__ = second, first
    found = pickle.loads(pickle.dumps(first))
    assert str(found.__cause__) == "second"
    loop = ValueError("itself")
    loop.__context__ = first
    first.__context__ = loop
    assert str(pickle.loads(pickle.dumps(first))) == "first"


def errors_of_all() -> list[tuple[type[ForebayError], BaseException]]:
    return [(cls, led_to(cls("what was wanted, found, and to be done", **FACTS))) for cls in CLASSES]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_error_comes_out_of_a_pool(method: str) -> None:
    """A pool whose result cannot be unpickled hangs for ever."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        for cls, result in [(cls, pool.apply_async(raise_it, (error,))) for cls, error in errors_of_all()]:
            with pytest.raises(cls) as caught:
                result.get(60)
            assert_same(caught.value, cls("what was wanted, found, and to be done", **FACTS))
            assert str(caught.value.__context__) == "the cache failed"


def test_every_error_comes_out_of_an_executor() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        for cls, result in [(cls, pool.submit(raise_it, error)) for cls, error in errors_of_all()]:
            assert type(result.exception(60)) is cls


@pytest.mark.parametrize(
    "error",
    [
        errors.Ambiguous.of("a", ["urls:a", "b:a"]),
        errors.ClaimConflict("taken", ours={"pids": [1, 2], "remotes": [None]}, theirs={"started": 1.5}),
        errors.NotFound("no such object", url="http://h/a", status=404),
        KeyError("a"),
        ValueError("a", 1),
    ],
    ids=repr,
)
def test_an_error_crosses_a_wire_with_its_class_and_its_facts(error: Exception) -> None:
    arrived = errors.from_wire(json.loads(json.dumps(errors.to_wire(error))))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))


def test_an_error_of_another_package_crosses_a_wire_as_its_name_and_text() -> None:
    class Theirs(Exception):
        pass

    arrived = errors.from_wire(errors.to_wire(Theirs("text")))
    assert isinstance(arrived, errors.FillFailed)
    assert (arrived.kind, str(arrived)) == ("Theirs", "Theirs: text")


def test_a_fact_that_is_not_plain_stays_behind() -> None:
    arrived = errors.from_wire(errors.to_wire(errors.ForebayError("text", plain=1, bytes=b"1", pairs=[(1, 2)])))
    assert isinstance(arrived, errors.ForebayError)
    assert arrived.facts == {"plain": 1}
