"""The classes of `forebay._dataclass` behave as those of the standard library, and importing them loads none of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

from forebay import _dataclass, errors
from forebay._model import Entry, Span, Transfer
from forebay.remote import RemoteOptions


def pair(**options: Any) -> tuple[Any, Any]:
    """The same class, made by the standard library and by Forebay."""

    def plain() -> type:
        class Sample:
            """A number and a text."""

            number: int
            text: str = "none"

            def doubled(self) -> int:
                return self.number * 2

        return Sample

    return dataclasses.dataclass(**options)(plain()), _dataclass.dataclass(**options)(plain())


KINDS: list[dict[str, bool]] = [
    {"frozen": True, "slots": True, "order": True}, {"frozen": True, "slots": True}, {"frozen": True}, {"slots": True}, {},
    {"slots": True, "eq": False},
]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_instances_are_made_compared_hashed_and_shown_as_those_of_the_standard_library(options: dict[str, bool]) -> None:
    theirs, ours = pair(**options)
    for arguments in ((), (1, "a", 2)):
        with pytest.raises(TypeError) as expected:
            theirs(*arguments)
        with pytest.raises(TypeError) as found:
            ours(*arguments)
        assert str(found.value).partition("__init__")[2] == str(expected.value).partition("__init__")[2]
    one, other = theirs(1, text="a"), ours(1, text="a")
    assert repr(other) == repr(one)
    assert other.doubled() == one.doubled()
    assert (other == ours(1, "a"), other == ours(2, "a"), other == one) == (one == theirs(1, "a"), one == theirs(2, "a"), False)
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if options.get("frozen"):
        assert hash(other) == hash(one)
    assert hasattr(other, "__dict__") == hasattr(one, "__dict__")
    assert ours(3).text == theirs(3).text == "none"
    assert ours.__match_args__ == theirs.__match_args__
    assert ours.__doc__ == theirs.__doc__
    assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_field_is_set_and_deleted_only_where_the_class_is_not_frozen(options: dict[str, bool]) -> None:
    for kind in pair(**options):
        value = kind(1)
        if options.get("frozen"):
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'number'"):
                value.number = 2
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'number'"):
                del value.number
            assert value.number == 1
        else:
            value.number = 2
            assert value.number == 2
            del value.number
            assert not hasattr(value, "number")


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_functions_of_dataclasses_accept_the_instances(options: dict[str, bool]) -> None:
    _, ours = pair(**options)
    value = ours(1, "a")
    assert dataclasses.is_dataclass(ours)
    assert [f.name for f in dataclasses.fields(value)] == ["number", "text"]
    assert dataclasses.asdict(value) == _dataclass.field_values(value) == {"number": 1, "text": "a"}
    for replace in (dataclasses.replace, _dataclass.replace):
        changed = replace(value, number=7)
        assert (type(changed), changed.number, changed.text) == (ours, 7, "a")


def test_order() -> None:
    assert sorted([Span(2, 1), Span(1, 3), Span(1, 2)]) == [Span(1, 2), Span(1, 3), Span(2, 1)]
    assert Span(1, 2) <= Span(1, 2) < Span(1, 3)
    with pytest.raises(TypeError):
        Span(1, 2) < (1, 3)  # type: ignore[operator]  # noqa: B015


@pytest.mark.parametrize("value", [Span(1, 2), Transfer(requests=3), RemoteOptions(attempts=2, headers={"a": "b"})])
def test_instances_are_copied_and_pickled(value: Any) -> None:
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


def test_the_options_of_fields_hold() -> None:
    secret = RemoteOptions(headers={"Authorization": "x"}, token="t")
    assert "Authorization" not in repr(secret)
    assert "token" not in repr(secret)
    assert hash(RemoteOptions(headers={"a": "b"})) == hash(RemoteOptions())
    assert RemoteOptions(headers={"a": "b"}) != RemoteOptions()
    assert RemoteOptions().headers is not RemoteOptions().headers


def test_many_instances_are_made_as_the_first_ones_are() -> None:
    """The first ones are made without compiling an ``__init__``."""
    _, ours = pair(frozen=True, slots=True)
    assert {repr(ours(1)) for _ in range(9)} == {repr(ours(number=1, text="none"))}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        ours(text="a")
    options = [RemoteOptions(attempts=2) for _ in range(9)]
    assert len({id(one.headers) for one in options}) == 9
    assert {one.attempts for one in options} == {2}
    for _ in range(2):
        with pytest.raises(errors.ConfigError):
            RemoteOptions(attempts=0)


def test_a_subclass_adds_attributes_to_a_frozen_class() -> None:
    class Named(Span):
        pass

    named = Named(1, 2)
    named.name = "first"  # type: ignore[attr-defined]
    assert (named.start, named.end, vars(named)) == (1, 3, {"name": "first"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        named.start = 4  # type: ignore[misc]


def test_making_instances_imports_no_dataclasses() -> None:
    code = (
        "import sys; from forebay._model import Span, Entry; a, b = Span(1, 2), Span(1, 2); assert a == b and hash(a) == hash(b);"
        "print(*{'dataclasses', 'inspect'} & set(sys.modules)); repr(a); print(*{'dataclasses', 'inspect'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert (before, sorted(after.split())) == ("", ["dataclasses", "inspect"])


def test_the_names_of_an_entry_are_its_fields() -> None:
    assert Entry.__match_args__ == tuple(field.name for field in dataclasses.fields(Entry))
