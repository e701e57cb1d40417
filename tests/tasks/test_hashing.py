"""The digest of a value: equal for equal values, in every process; another for any other."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import threading
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.tasks import hashing
from forebay.tasks.hashing import Unstable, as_own, digest_of
from forebay.tasks.naming import Tag


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Job:
    step: int
    rates: list[float] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def total(self) -> float:
        return sum(self.rates)


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    step: int = 1


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: object) -> None:
        self.a = a


class Chosen:
    """Says itself what of it counts."""

    def __init__(self, value: int) -> None:
        self.value, self.lock = value, threading.Lock()

    def __getstate__(self) -> int:
        return self.value


def named(x: int) -> int:
    return x


DIFFERENT: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    255,
    1 << 70,
    -(1 << 70),
    1 << 20_000,
    0.0,
    -0.0,
    1.0,
    float("inf"),
    1j,
    "",
    "1",
    "a",
    "é",
    "e\u0301",
    "\ud800",
    "x" * 300,
    "x" * 301,
    b"",
    b"a",
    b"x" * 300,
    bytearray(b"a"),
    memoryview(b"a"),
    ...,
    NotImplemented,
    (),
    (1,),
    (1, 2),
    ((1,), 2),
    (1, (2,)),
    [],
    [1],
    [[]],
    [[], []],
    ["a", "b"],
    ["ab"],
    [[1, 2], 3],
    {},
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {1: "a"},
    {"a": {"b": 1}},
    {"a": {}, "b": 1},
    set(),
    {1},
    {1, 2},
    frozenset(),
    frozenset({1}),
    range(3),
    range(0, 4, 2),
    slice(1, 2),
    slice(1, 2, 3),
    Colour.RED,
    Colour.BLUE,
    Mode.READ,
    Mode.WRITE,
    Mode.READ | Mode.WRITE,
    Point(1, 2),
    Point(2, 1),
    Job(1),
    Job(2),
    Job(1, [0.5]),
    Fixed(1),
    Fixed(2),
    Plain(1),
    Plain(2),
    Plain(None),
    Slotted(1),
    Slotted(2),
    Chosen(1),
    Chosen(2),
    pathlib.Path("a"),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("a"),
    datetime.date(2026, 1, 1),
    datetime.datetime(2026, 1, 1),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.timedelta(1),
    uuid.UUID(int=1),
    uuid.UUID(int=2),
    decimal.Decimal("1.0"),
    decimal.Decimal("1.00"),
    collections.OrderedDict(a=1, b=2),
    collections.OrderedDict(b=2, a=1),
    collections.defaultdict(int, a=1),
    collections.Counter("aab"),
    collections.deque([1]),
    collections.deque([1], maxlen=3),
    re.compile("a"),
    re.compile("a", re.IGNORECASE),
    int,
    str,
    Plain,
    Job,
    list[int],
    dict[str, int],
    named,
    len,
    "a".upper,
    "b".upper,
    functools.partial(named, 1),
    functools.partial(named, 2),
    json,
    sys,
    logging.getLogger("a"),
    logging.getLogger("b"),
    io.BytesIO(b"a"),
    io.BytesIO(b"b"),
    ValueError("a"),
    ValueError("b"),
    np.float32(1),
    np.float64(1),
    np.int64(1),
    np.str_("a"),
    np.bool_(True),
    np.datetime64("2026"),
    np.dtype("f4"),
    np.dtype(">f4"),
    np.zeros(0),
    np.zeros((0, 2)),
    np.zeros(2),
    np.zeros((1, 2)),
    np.zeros((2, 1)),
    np.zeros(2, "f4"),
    np.zeros(2, ">f8"),
    np.ones(2),
    np.array(1.0),
    np.zeros(2, "i8"),
    np.zeros(2, "M8[s]"),
    np.zeros(2, "M8[ms]"),
    np.array(["a"]),
    np.array(["a"], object),
    np.array([1, None], object),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    np.array([(1, 2.0)], [("a", "i4"), ("c", "f8")]),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0],
    np.ma.masked_array([1, 2], [0, 1]),
    np.ma.masked_array([1, 2], [1, 0]),
    np.add,
    np.sum,
    np.random.default_rng(1),
    np.random.default_rng(2),
]


many = list(range(40))
DIFFERENT += [
    many,
    tuple(many),
    many[:-1],
    [float(x) for x in many],
    [*many, 1 << 64],
    [*many, 1 << 65],
    [*many, True],
    [*many, 1],
    [*many, 1.0],
    [-x for x in many],
    {"a": many},
    [many],
]
DIFFERENT += [np.array(many), set(many), {x: x for x in many}, [0.0] * 40, [-0.0] * 40, [str(x) for x in many]]


def test_different_values_differ() -> None:
    digests = [digest_of(value) for value in DIFFERENT]
    twice = [(DIFFERENT[i], DIFFERENT[j]) for j in range(len(digests)) for i in range(j) if digests[i] == digests[j]]
    assert twice == []


def test_a_digest_is_32_hex_digits() -> None:
    assert re.fullmatch("[0-9a-f]{32}", digest_of())
    assert re.fullmatch("[0-9a-f]{32}", digest_of(*DIFFERENT))


def test_values_do_not_run_into_each_other() -> None:
    calls = [
        ("a", "b"),
        ("ab",),
        ("ab", ""),
        ("", "ab"),
        (["a"], "b"),
        (["a", "b"],),
        (("a", "b"),),
        ([], "a", "b"),
        (1, 2),
        (12,),
        ((1, 2),),
        ([1], 2),
    ]
    calls += [("asb",), ("as1:b",), (b"a", b"b"), (b"abb",)]
    assert len({digest_of(*call) for call in calls}) == len(calls)


SAME: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),
    (lambda: {1, "a", None, 2.5}, lambda: {2.5, None, "a", 1}),
    (lambda: [["x"], ["x"]], lambda: [["x"]] * 2),
    (lambda: collections.Counter("ab"), lambda: collections.Counter("ba")),
    (lambda: Job(1, [1.0]), lambda: job_that_remembers()),
    (lambda: Tag("a", "key"), lambda: "a"),
    (lambda: np.arange(12).reshape(3, 4), lambda: np.asfortranarray(np.arange(12).reshape(3, 4))),
    (lambda: np.arange(5), lambda: np.arange(10)[::2] // 2),
    (lambda: np.arange(5)[::-1], lambda: np.array([4, 3, 2, 1, 0])),
    (lambda: np.broadcast_to(np.float64(1), (3, 3)), lambda: np.ones((3, 3))),
    (lambda: np.zeros(3), lambda: read_only(np.zeros(3))),
    (lambda: memoryview(b"abcd")[::2], lambda: memoryview(b"ac")),
    (lambda: np.array(["a", None], object), lambda: np.array(["a", None], object)),
    (lambda: float("nan"), lambda: float("nan")),
    (lambda: "".join(["a", "b"]), lambda: "ab"),
    (lambda: circle(), lambda: circle()),
    (lambda: Chosen(1), lambda: Chosen(1)),
]  # fmt: skip


def job_that_remembers() -> Job:
    job = Job(1, [1.0])
    assert job.total == 1.0
    return job


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def circle() -> Any:
    first, second = Plain(None), Plain(None)
    first.value, second.value = [second, first], {"back": first}
    return first


@pytest.mark.parametrize("pair", SAME)
def test_equal_values_agree(pair: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
    assert digest_of(pair[0]()) == digest_of(pair[1]())


def test_a_mapped_array_is_as_one_in_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    assert digest_of(np.load(tmp_path / "a.npy", mmap_mode="r")) == digest_of(np.arange(100))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


def spelled(value: Any) -> str:
    """A text that differs wherever values, or their types, do."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{key!r}:{spelled(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(spelled, value))})"
    return repr(value)


@given(plain, plain)
def test_digests_agree_where_values_do(first: Any, second: Any) -> None:
    assert (digest_of(first) == digest_of(second)) == (spelled(first) == spelled(second))


PROGRAM = """
import sys, json, pathlib, datetime, uuid, decimal, functools, collections, numpy as np
from forebay.tasks.hashing import as_own, digest_of
class Here:
    def __init__(self): self.names = {"a", "b", "c"}
def outer(n):
    return lambda x: (x + n, [y for y in "abc"], "a" in {"a", "b", "c"})
print(digest_of({"a": {1, "b", None}, "c": frozenset("xyz")}, pathlib.Path("/x"), Here(), Here, outer(1), outer, np.arange(3),
                functools.partial(int, "1"), datetime.datetime(2026, 1, 1), collections.defaultdict(list, x=[1])), as_own(outer(2)).hex())
"""


def test_s35_digests_agree_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    found = set()
    for seed, place in (("0", tmp_path), ("1", "/"), ("random", tmp_path)):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "USER": f"user{seed}", "HOME": str(place)}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=place, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (threading.Lock, "_thread.lock"),
        (generator, "generator"),
        (lambda: open(os.devnull), "_io.TextIOWrapper"),
        (lambda: Plain(threading.Lock()), r"a _thread.lock in a .*test_hashing\.Plain"),
        (lambda: [{"a": Plain([threading.Lock()])}], r"a _thread.lock in a .*test_hashing\.Plain"),
        (lambda: {threading.Lock(): 1}, "_thread.lock"),
        (lambda: np.array([threading.Lock()], object), "_thread.lock"),
        (lambda: functools.partial(named, threading.Lock()), "_thread.lock"),
        (threading.current_thread, "_thread"),
        (lambda: sys._getframe(), "frame"),
        (lambda: types.MappingProxyType({}), "mappingproxy"),
        (lambda: np.frompyfunc(named, 1, 1), r"a numpy\.ufunc whose name leads to nothing"),
    ],
)
def test_what_has_no_content_is_unstable(make: Callable[[], Any], words: str) -> None:
    value = make()
    with pytest.raises(Unstable, match=words) as raised:
        digest_of(1, value)
    assert raised.value.index == 1
    getattr(value, "close", lambda: None)()


def test_what_its_own_code_raises_makes_it_unstable() -> None:
    class Broken:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise ZeroDivisionError("no")

    class Told:
        def __forebay_content__(self) -> Any:
            raise LookupError("gone")

    with pytest.raises(Unstable, match="Broken: ZeroDivisionError: no") as raised:
        digest_of(Broken())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(Unstable, match="Told: LookupError: gone"):
        digest_of([Told()])


def test_many_ways_to_the_same_object_cost_no_more_than_one() -> None:
    value: Any = []
    for _ in range(100):
        value = [value, value]
    assert digest_of(value) == digest_of(value)


def test_a_thicket_of_circles_ends() -> None:
    nodes = [Plain(None) for _ in range(40)]
    for node in nodes:
        node.value = list(nodes)
    with pytest.raises(Unstable, match="too many ways"):
        digest_of(nodes)


def test_what_is_nested_too_deep_is_unstable() -> None:
    value: Any = [threading]
    for _ in range(10_000):
        value = [value]
    with pytest.raises(Unstable, match="deep"):
        digest_of(value)


def test_adapters_say_what_counts() -> None:
    class Reference:
        def __init__(self, to: object) -> None:
            self.to, self.lock = to, threading.Lock()

    class Special(Reference):
        pass

    hashing.register(Reference, lambda reference: reference.to)
    assert digest_of(Reference(1)) == digest_of(Reference(1)) != digest_of(Reference(2))
    assert digest_of([Special(1)]) == digest_of([Reference(1)])


def test_a_class_says_itself_what_counts() -> None:
    class Client:
        def __init__(self, url: str) -> None:
            self.url, self.lock = url, threading.Lock()

        def __forebay_content__(self) -> str:
            return self.url

    assert digest_of(Client("a")) == digest_of(Client("a")) != digest_of(Client("b"))
    assert digest_of(Client("a")) != digest_of("a")


# -- tensors, tables ---------------------------------------------------------------------------------------------------


def test_tensors_count_by_content(torch: Any) -> None:
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest_of(base) == digest_of(base.t().contiguous().t()) == digest_of(base.clone())
    others = [
        base,
        base + 1,
        base.reshape(3, 2),
        base.double(),
        base.bfloat16(),
        base.clone().requires_grad_(),
        torch.nn.Parameter(base),
        base.to_sparse(),
    ]
    others += [
        torch.tensor(1.0),
        torch.tensor([1.0]),
        torch.zeros(0),
        torch.zeros(0, 2),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.tensor([1j]).conj(),
    ]
    assert len({digest_of(tensor) for tensor in others}) == len(others)
    assert digest_of(base.to_sparse()) == digest_of(base.to_sparse())
    with pytest.raises(Unstable, match="meta"):
        digest_of(torch.zeros(2, device="meta"))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    copy = torch.nn.Linear(2, 2)
    assert digest_of(model) != digest_of(copy)
    copy.load_state_dict(model.state_dict())
    assert digest_of(model) == digest_of(copy)


def test_the_attributes_of_a_tensor_count(torch: Any) -> None:
    class Boxes(torch.Tensor):  # type: ignore[misc]
        __slots__ = ("unit",)

    def boxes(format: str, unit: str) -> Any:
        found = torch.ones(1, 4).as_subclass(Boxes)
        found.format, found.unit = format, unit
        return found

    assert digest_of(boxes("XYXY", "px")) == digest_of(boxes("XYXY", "px"))
    different = [boxes("XYXY", "px"), boxes("XYWH", "px"), boxes("XYXY", "mm"), torch.ones(1, 4).as_subclass(Boxes)]
    assert len({digest_of(one) for one in different}) == len(different)


def test_tables_count_by_content() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": [1, 2], "b": ["x", None]})
    assert digest_of(table) == digest_of(arrow.table({"a": [1, 2], "b": ["x", None]}))
    assert digest_of(table) != digest_of(arrow.table({"a": [1, 3], "b": ["x", None]}))
    assert digest_of(table.schema) != digest_of(table.rename_columns(["a", "c"]).schema)


def test_frames_count_by_content() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", None]}, index=["i", "j"])
    assert digest_of(frame) == digest_of(frame.copy())
    others = [
        frame,
        frame.rename(columns={"a": "c"}),
        frame.reset_index(),
        frame[::-1],
        frame.assign(a=3),
        frame["a"],
        frame["a"].rename("b"),
    ]
    assert len({digest_of(other) for other in others}) == len(others)


# -- dataclasses -------------------------------------------------------------------------------------------------------


class Longer(Job):
    def __init__(self, step: int, more: object) -> None:
        super().__init__(step)
        self.more = more


class LongerFixed(Fixed):
    def __init__(self, step: int, more: object) -> None:
        super().__init__(step)
        object.__setattr__(self, "more", more)


@dataclasses.dataclass
class Given:
    x: dataclasses.InitVar[int]

    def __post_init__(self, x: int) -> None:
        self.y = x


@dataclasses.dataclass
class Tokens(list[int]):
    name: str = ""


@dataclasses.dataclass
class Words(dict[str, int]):
    name: str = ""


@dataclasses.dataclass
class Length(float):
    unit: str = dataclasses.field(default="m", init=False)


def tokens(*numbers: int) -> Tokens:
    found = Tokens()
    found.extend(numbers)
    return found


def words(**given: int) -> Words:
    found = Words()
    found.update(given)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Longer(1, n), lambda n: LongerFixed(1, n), Given, tokens, lambda n: words(a=n), lambda n: float.__new__(Length, n),
    ],
)  # fmt: skip
def test_what_a_dataclass_has_beside_its_fields_counts(make: Callable[[int], Any]) -> None:
    assert digest_of(make(1)) == digest_of(make(1)) != digest_of(make(2))


# -- functions ---------------------------------------------------------------------------------------------------------


def scaled(n: int) -> Callable[[Callable[[int], int]], Callable[[int], int]]:
    def decorate(function: Callable[[int], int]) -> Callable[[int], int]:
        @functools.wraps(function)
        def wrapper(x: int) -> int:
            return n * function(x)

        return wrapper

    return decorate


def shifted(function: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(function)
    def wrapper(x: int) -> int:
        return 1 + function(x)

    return wrapper


IN_A_LOOP: list[Callable[[int], int]] = []
for number in (1, 2):

    def in_a_loop(x: int, n: int = number) -> int:
        return x * n

    IN_A_LOOP.append(in_a_loop)


def inner(n: int) -> Callable[[int], int]:
    def function(x: int) -> int:
        return x * n

    return function


def test_functions_of_one_name_among_the_arguments_differ() -> None:
    wrapped = [scaled(1)(named), scaled(2)(named), shifted(named), scaled(1)(shifted(named)), named]
    remembered = [functools.lru_cache(one) for one in (inner(1), inner(2), *wrapped[:4])]
    different = [*wrapped, *IN_A_LOOP, *remembered]
    assert len({digest_of(one) for one in different}) == len(different)
    assert digest_of(scaled(1)(named)) == digest_of(scaled(1)(named))
    assert digest_of(functools.lru_cache(inner(1))) == digest_of(functools.lru_cache(inner(1)))


def test_functions_as_values() -> None:
    def adder(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    def times(n: int) -> Callable[[int], int]:
        return lambda x: x * n

    assert digest_of(adder(1)) == digest_of(adder(1)) != digest_of(adder(2))
    assert digest_of(adder(1)) != digest_of(times(1))
    assert digest_of(lambda x, y=1: x) != digest_of(lambda x, y=2: x)
    assert digest_of(named) != digest_of(generator)


def makes(n: object, calls: object, other: object = None) -> Callable[[int], Any]:
    count = 0

    def function(x: int) -> Any:
        nonlocal count
        count += 1
        calls.append(x)  # type: ignore[attr-defined]
        return n, other

    return function


def test_what_tells_functions_of_one_name_apart() -> None:
    first = as_own(makes(1, []))
    assert as_own(makes(2, [])) != first
    assert as_own(makes(1, [], (1, pathlib.Path("x")))) not in (first, as_own(makes(1, [], (1, pathlib.Path("y")))))
    assert as_own(makes(1, [], Fixed(1))) not in (first, as_own(makes(1, [], Fixed(2))))
    assert as_own(makes(1, [], LongerFixed(1, 1))) != as_own(makes(1, [], LongerFixed(1, 2)))
    assert as_own(makes(1, [], Colour.RED)) != as_own(makes(1, [], Colour.BLUE))
    assert as_own(makes(1, [], makes(1, []))) != as_own(makes(1, [], makes(2, [])))
    assert as_own(named) == b""  # its code is part of its key
    assert as_own(lambda x: x) != as_own(lambda x: -x)
    assert as_own(functools.partial(named, 1)) != as_own(functools.partial(named, 2))


def test_what_a_function_works_with_is_no_part_of_it() -> None:
    calls: list[int] = []
    function = makes(1, calls)
    first = as_own(function)
    function(1)
    assert as_own(function) == as_own(makes(1, calls)) == first
    for tool in (threading.Lock(), threading.Event(), {"a": 1}, open, pytest.MonkeyPatch()):
        assert as_own(makes(1, [], tool)) == as_own(makes(1, [], tool))


def test_functions_that_call_each_other() -> None:
    def pair(n: int) -> Any:
        def even(x: int) -> bool:
            return x == 0 or odd(x - 1)

        def odd(x: int) -> bool:
            return x != n and even(x - 1)

        return even

    assert as_own(pair(0)) == as_own(pair(0)) != as_own(pair(1))
