"""Codecs: what comes back, where it lies, and what may write into it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from forebay import codecs, errors
from forebay._kernel.mappings import map_file
from forebay.codecs import ALIGNMENT, MAPPED_FROM, codec

np = pytest.importorskip("numpy")
from hypothesis.extra import numpy as hnp  # noqa: E402  (needs NumPy)

SRC = Path(__file__).parents[2] / "src"
quick = hypothesis.settings(deadline=None, max_examples=60)


class Record:
    """A payload as a segment keeps it: read-only at a multiple of 64, with a private copy at call."""

    def __init__(self, pieces: Any) -> None:
        payload = b"".join(bytes(memoryview(p).cast("B")) for p in pieces)
        self.copies = 0
        self.data = self._aligned(payload).toreadonly()

    @staticmethod
    def _aligned(payload: bytes) -> memoryview:
        room = np.zeros(len(payload) + ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        view = memoryview(room)[begin : begin + len(payload)]
        view[:] = payload
        return view

    def private(self) -> memoryview:
        self.copies += 1
        return self._aligned(bytes(self.data))


def there_and_back(name: str, value: Any) -> Any:
    record = Record(codec(name).encode(value))
    return codec(name).decode(record.data, record.private)


def lies_in(array: Any, data: memoryview) -> bool:
    return bool(np.shares_memory(array, np.frombuffer(data, np.uint8)))


def check_same(new: Any, old: Any) -> None:
    assert type(new) is np.ndarray
    assert (new.dtype, new.shape, new.flags.fnc) == (old.dtype, old.shape, old.flags.fnc)
    assert new.tobytes() == old.tobytes()
    assert not new.flags.writeable
    assert new.ctypes.data % ALIGNMENT == 0 or not new.nbytes


def orders(array: Any) -> Any:
    """The same values in other orders of memory, and in strides."""
    return st.sampled_from([array, np.asfortranarray(array) if array.ndim else array, array[::-1] if array.ndim else array, array.T])


DTYPES = (
    hnp.scalar_dtypes()
    | hnp.array_dtypes(hnp.scalar_dtypes(), allow_subarrays=True)
    | st.builds(lambda kind, size: np.dtype(f"{kind}{size}"), st.sampled_from("SUV"), st.integers(1, 9))
)


def array_of(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.ndarray(shape, dtype, np.random.default_rng(seed).bytes(size) if size else bytearray(1))


ARRAYS = st.builds(array_of, DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4), st.integers(0, 9)).flatmap(orders)


# raw


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8), b"", np.empty((0, 3))])
def test_raw_is_the_bytes(data: Any) -> None:
    record = Record(codec("raw").encode(data))
    assert codec("raw").decode(record.data, record.private) is record.data
    assert record.data == bytes(data)


@pytest.mark.parametrize("data", ["text", 3, None, memoryview(b"abcd")[::2], np.ones((4, 4))[:, 1]])
def test_raw_refuses_what_is_no_bytes(data: Any) -> None:
    with pytest.raises(errors.ConfigError, match="not bytes-like"):
        codec("raw").encode(data)


# numpy


@quick
@hypothesis.given(ARRAYS)
def test_arrays_come_back(array: Any) -> None:
    check_same(there_and_back("numpy", array), array if array.flags.forc else np.ascontiguousarray(array))


@pytest.mark.parametrize("value", [3, [1.5, 2.5], [[1, 2], [3, 4]], "text", True, (), np.float32(2), (np.ones(3), 7), {"a": np.ones(3)}])
def test_what_is_no_array_is_refused_with_the_codec_that_fits(value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"codec='numpy' stores one numpy.ndarray, and the value is a .*: use codec='pytree'"):
        codec("numpy").encode(value)


def test_a_tensor_is_no_array(torch: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"a torch\.Tensor: use codec='pytree'"):
        codec("numpy").encode(torch.ones(3))


def test_a_mapped_array_is_one(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "array", np.uint8, "w+", shape=(3, 5))
    mapped[:] = 7
    check_same(there_and_back("numpy", mapped), np.asarray(mapped))


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [("raw", "text", "pytree"), ("raw", object(), "pickle"), ("json", (1,), "pytree"), ("json", b"", "raw"), ("json", np.ones(2), "numpy")],
)
def test_a_refusal_names_the_codec_that_fits(name: str, value: Any, fits: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"codec='{name}'.*use codec='{fits}'"):
        codec(name).encode(value)


# pytree


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(exclude_categories=())), st.binary(),
    st.complex_numbers(allow_nan=False), st.binary().map(bytearray), st.sampled_from(["\ud83d\ude00", -(1 << 70)]),
    st.sampled_from([1 << 10_000, float("inf")]),
)  # fmt: skip
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.just(()) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


def kinds(value: Any) -> Any:
    """A value with the types of all that is in it: True is not 1."""
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(item) for item in value]
    if isinstance(value, dict):
        return dict, [(kinds(key), kinds(item)) for key, item in value.items()]
    return type(value), value


@quick
@hypothesis.given(TREES)
def test_plain_values_come_back(value: Any) -> None:
    assert kinds(there_and_back("pytree", value)) == kinds(value)


@quick
@hypothesis.given(st.lists(ARRAYS, max_size=4))
def test_arrays_in_a_tree_come_back_as_views(arrays: list[Any]) -> None:
    record = Record(codec("pytree").encode(({"all": [(a, "name", b"x") for a in arrays]}, 3)))
    back, label = codec("pytree").decode(record.data, record.private)
    assert (label, len(back["all"])) == (3, len(arrays))
    for (new, name, tail), old in zip(back["all"], arrays, strict=True):
        check_same(new, old if old.flags.forc else np.ascontiguousarray(old))
        assert (name, tail) == ("name", b"x")
        assert not new.nbytes or lies_in(new, record.data)
    assert record.copies == 0


@pytest.mark.parametrize("scalar", [np.int64(-3), np.float16(0.5), np.bool_(True), np.str_("é"), np.bytes_(b"a\0b"), np.complex64(1j)])
def test_numbers_of_numpy_stay_what_they_are(scalar: Any) -> None:
    back = there_and_back("pytree", (scalar, {scalar: 1}))
    assert (type(back[0]), back[0].dtype, back[0]) == (type(scalar), scalar.dtype, scalar)
    assert list(back[1]) == [scalar]
    when = np.datetime64("2026-01-02", "D")
    assert there_and_back("pytree", [when, np.str_("")]) == [when, np.str_("")]


@pytest.mark.parametrize("numbers", [0, 10, 1 << 20])
def test_tensors_in_a_tree_may_be_written_to(numbers: int, torch: Any) -> None:
    tensor = torch.arange(numbers * 2, dtype=torch.bfloat16).reshape(2, -1)
    record = Record(codec("pytree").encode({"x": tensor, "t": tensor.T, "y": 3}))
    back = codec("pytree").decode(record.data, record.private)
    for name, old in (("x", tensor), ("t", tensor.T)):
        assert torch.equal(back[name], old)
        assert (back[name].stride(), back[name].dtype) == (old.stride(), old.dtype)
    back["x"].zero_()
    assert torch.equal(codec("pytree").decode(record.data, record.private)["x"], tensor)
    grad = there_and_back("pytree", torch.nn.Parameter(torch.ones(3)))
    assert type(grad) is torch.nn.Parameter
    assert grad.requires_grad


def test_over_writable_memory_all_of_a_tree_is_writable(torch: Any) -> None:
    data = Record(codec("pytree").encode((np.zeros(3), torch.zeros(1 << 20)))).private()
    array, tensor = codec("pytree").decode(data, lambda: pytest.fail("a second copy"))
    array[0], tensor[0] = 1, 1
    again = codec("pytree").decode(data.toreadonly(), lambda: memoryview(bytearray(data)))
    assert (again[0][0], again[1][0]) == (1, 1)


class Text(str):
    __slots__ = ()


class Float(np.float32):
    pass


class Foreign(np.float32):
    """A number of another package, such as a bfloat16: its dtype tells itself as plain bytes."""

    class _Dtype:
        hasobject, kind, str = False, "f", "<V2"

    dtype: Any = _Dtype()


Foreign._Dtype.type = Foreign  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "the value is a object"),
        ((1, {"a": [datetime.date(2026, 1, 2)]}), r"value\[1\]\['a'\]\[0\] is a datetime.date"),
        (subprocess.CompletedProcess("x", 0), "is a subprocess.CompletedProcess"),
        (time.gmtime(0), "is a time.struct_time"),
        ({1, 2}, "is a set"),
        (Text("a"), r"is a .*Text"),
        ([np.array([None])], r"value\[0\] is an array of dtype object"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        ({frozenset(): 1}, "the frozenset frozenset.* as a key"),
        ({(1, object()): 1}, "object"),
        (Foreign(1), r"is a .*Foreign"),
        (Float(1), r"is a .*Float"),
    ],
)
def test_what_no_tree_can_hold_is_refused(value: Any, where: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"codec='pytree'.*{where}.*codec='pickle'"):
        codec("pytree").encode(value)


def test_what_lies_in_a_value_many_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is written out, and a few lists would make a tree without end."""
    monkeypatch.setattr("forebay.codecs.plain.MAX_REPEATED", 1000)
    row = [1.0, 2.0]
    assert there_and_back("pytree", [row] * 501) == [row] * 501
    with pytest.raises(errors.ConfigError, match=r"value\[501\] is once more a list .* codec='pickle'"):
        codec("pytree").encode([row] * 502)
    tree: Any = {}
    for _ in range(60):
        tree = {"a": tree, "b": (tree, tree)}
    with pytest.raises(errors.ConfigError, match="written out each time: use codec='pickle'"):
        codec("pytree").encode(tree)
    with pytest.raises(errors.ConfigError, match="use codec='pickle'"):
        codec("numpy").encode(tree)


def test_to_name_the_codec_that_fits_copies_nothing(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setattr("forebay.codecs.arrays.split_array", None)
    monkeypatch.setattr("forebay.codecs.arrays.split_tensor", None)
    for value in ([np.zeros((3, 4))[:, 1]], [torch.zeros(9)[::2], b"x"]):
        with pytest.raises(errors.ConfigError, match="use codec='pytree'"):
            codec("numpy").encode(value)


def test_a_list_that_lies_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(errors.ConfigError, match="lies in itself"):
        codec("pytree").encode(value)


def tree(structure: str, memory: bytes = b"", mark: bytes = b"fby1") -> bytes:
    text = structure.encode()
    front = mark + len(text).to_bytes(4, "little") + text
    return front + bytes(-len(front) % 64) + memory if memory else front


DAMAGED_TREES = [
    b"", b"fby1", tree("1", mark=b"fbp1"), tree("1") + b"x", tree("1")[:-1], tree("{"), tree('{"a":1}')[:-1], tree("[]"), tree('["?"]'),
    tree('["{",[1]]'), tree('["{",[["[",1]],1]'), tree('["a","x"]'), tree("""["a","('|O',(1,),'C')"]""", bytes(8)),
    tree("""["a","('<i4',(2,),'C')"]""", bytes(7)), tree("""["a","('<i4',(2,),'C')"]""", bytes(9)), tree('["a"]'), tree('["a",7]'),
    tree('["n","|O","00"]'), tree('["n","<i4","00"]'), tree('["n","<i4","zz"]'), tree('["b",-1]'), tree('["b",1e9]'), tree('["b","x"]'),
    tree('["b",9223372036854775807]', b"x"), tree('["i","x"]'), tree('["s","zz"]'), tree('["c","a",1]'), tree("[" * 100_000),
    tree('[["("]]'),
    tree('["t",4,"float32",[1],[1],false,false]', b"123"), tree('["t",4,"load",[1],[1],false,false]', b"1234"),
    tree('["t",4,"float32",[9],[1],false,false]', b"1234"), tree('["t",4,"float32",[-1],[1],false,false]', b"1234"), tree('["t"]'),
    tree('["t",4,"float32",[1],[1],true]', b"1234"), tree('["t",4,"__name__",[1],[1],false,false]', b"1234"), tree('["\\ud800"]'),
    tree("é"), tree('["n","f8,,","00"]'), tree('["n","S99999999999999",""]'), tree("""["a","('V1099511627776', (), 'C')"]"""),
]  # fmt: skip


@pytest.mark.frameworks  # some of the trees hold tensors
def test_a_damaged_tree_is_told() -> None:
    for payload in DAMAGED_TREES:
        with pytest.raises(errors.Damaged):
            print(payload[:100], codec("pytree").decode(memoryview(payload), lambda payload=payload: memoryview(bytearray(payload))))


ALIGNED = np.dtype([("a", "u1"), ("b", ">f8", (2, 2)), ("é", "M8[ms]")], align=True)
LONG = np.dtype([(f"column {i}", "f4") for i in range(100)])


@pytest.mark.parametrize("dtype", [ALIGNED, LONG, "S0", "V0", ">c16", "m8[25s]"], ids=str)
def test_dtypes_come_back(dtype: Any) -> None:
    array = np.zeros(3, dtype)
    check_same(there_and_back("numpy", array), array)
    check_same(there_and_back("pickle", array), array)


def test_only_pickle_keeps_the_metadata_of_a_dtype() -> None:
    array = np.zeros(3, np.dtype("i4", metadata={"unit": "m"}))
    check_same(there_and_back("numpy", array), array)
    assert there_and_back("pickle", array).dtype.metadata == {"unit": "m"}


def test_an_array_is_a_view_of_the_record() -> None:
    record = Record(codec("numpy").encode(np.arange(6)))
    assert lies_in(codec("numpy").decode(record.data, record.private), record.data)
    assert record.copies == 0


def test_an_array_over_writable_memory_is_writable() -> None:
    for name in ("numpy", "pickle"):
        stored = np.arange(6)
        stored.flags.writeable = False
        data = Record(codec(name).encode(stored)).private()
        array = codec(name).decode(data, lambda data=data: data)
        array[0] = 9
        assert lies_in(array, data)


def odd_dtype() -> Any:
    return np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]})


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, None]),
        np.zeros(2, [("a", "O")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2, odd_dtype()),
        np.array(["a", "long word" * 9], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array([None]),
        np.zeros(2, [(f"{i}" * 300, "u1") for i in range(80)]),
    ],
    ids=["objects", "objects in a field", "masked", "fields out of order", "strings of any length", "a long description"],
)
def test_numpy_sends_the_rest_to_pickle(value: Any) -> None:
    with pytest.raises(errors.ConfigError, match="codec='pickle'"):
        codec("numpy").encode(value)
    back = there_and_back("pickle", value)
    assert np.array_equal(np.ma.getdata(back), np.ma.getdata(value))


def head(text: str, blocks: int = 1) -> bytes:
    return bytes((blocks,)) + text.encode().ljust(64 * blocks - 1)


DAMAGED_ARRAYS = [
    b"",
    b"\0" * 64,
    b"\1",
    b"\xff" * 100,
    head("('<i4', (2,), 'C')") + b"1234567",
    head("('<i4', (2,), 'C')") + b"123456789",
    head("('<i4', (-2,), 'C')"),
    head("('<i4', (-2, -1), 'C')") + b"12345678",
    head("('<i4', (True,), 'C')") + b"1234",
    head("('<i4', 2, 'C')") + b"12345678",
    head("('<i4', (2,), 'K')") + b"12345678",
    head("('<i4', (2,), [])") + b"12345678",
    head("('<i4', (2,))") + b"12345678",
    head("('|O', (1,), 'C')") + b"12345678",
    head("([('a', '|O')], (1,), 'C')") + b"12345678",
    head("('no', (1,), 'C')") + b"12345678",
    head("(7, (1,), 'C')") + b"12345678",
    head("([1], (1,), 'C')") + b"12345678",
    head("([('a', 'u1'), ('a', 'u1')], (1,), 'C')") + b"12",
    head("(None, (1,), 'C')") + b"12345678",
    head("({}, (1,), 'C')") + b"12345678",
    head("__import__('os').abort()") + b"12345678",
    head("('<i4', (4611686018427387904, 4), 'C')"),
    head("('<i4', (1,) * 2, 'C')") + b"1234",
    head("(" * 4000, 64),
    head("-" * 16000, 255),
    head("('<i4', (" + "1," * 100 + "), 'C')", 8) + b"1234",
    head("('|u1', (0, 9223372036854775807, 9223372036854775807, 9), 'C')"),
]


def test_a_damaged_array_is_told() -> None:
    for payload in DAMAGED_ARRAYS:
        with pytest.raises(errors.Damaged):
            print(payload[:100], codec("numpy").decode(memoryview(payload), bytearray))


@quick
@hypothesis.given(st.integers(0, 63), st.integers(0, 255))
def test_a_flipped_byte_of_a_head_is_told_or_harmless(at: int, value: int) -> None:
    payload = bytearray(b"".join(bytes(p) for p in codec("numpy").encode(np.arange(8, dtype="<i4"))))
    payload[at] = value
    try:
        array = codec("numpy").decode(memoryview(payload).toreadonly(), bytearray)
    except errors.Damaged:
        return
    assert array.nbytes == len(payload) - 64 * payload[0]


# pickle


@dataclasses.dataclass
class Sample:
    image: Any
    label: int
    more: dict[str, Any]


class Pair(NamedTuple):
    image: Any
    label: Any


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.complex_numbers(allow_nan=False),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.builds(Pair, inner, inner),
    max_leaves=8,
)


@quick
@hypothesis.given(NESTED)
def test_objects_come_back(value: Any) -> None:
    assert there_and_back("pickle", value) == value


@quick
@hypothesis.given(st.lists(ARRAYS, max_size=4))
def test_arrays_in_objects_come_back_as_views(arrays: list[Any]) -> None:
    sample = Sample(arrays[0] if arrays else None, 3, {"all": [(a, "name") for a in arrays]})
    record = Record(codec("pickle").encode(sample))
    back = codec("pickle").decode(record.data, record.private)
    assert (back.label, len(back.more["all"])) == (3, len(arrays))
    for (new, name), old in zip(back.more["all"], arrays, strict=True):
        check_same(new, old if old.flags.forc else np.ascontiguousarray(old))
        assert name == "name"
        assert not new.nbytes or lies_in(new, record.data)
    assert not arrays or back.image is back.more["all"][0][0]
    assert record.copies == 0


@pytest.mark.parametrize(
    "array",
    [np.arange(5.0), np.zeros((3, 4), order="F"), np.zeros((0, 2)), np.array(3), np.zeros(4, [("a", "i4"), ("b", "f8")])],
    ids=["vector", "fortran", "empty", "number", "fields"],
)
def test_an_array_alone_is_not_unpickled_each_time(array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(codec("pickle").encode(array))
    data = record.data
    stream = data[24 : 24 + int.from_bytes(data[8:16], "little")]
    unpickled = pickle.loads(stream, buffers=[data[len(data) - array.nbytes :]])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was unpickled")

    monkeypatch.setattr("forebay.codecs.pickle.loads", refuse)
    for _ in range(2):
        decoded = codec("pickle").decode(data, record.private)
        check_same(decoded, array)
        check_same(decoded, unpickled)
        assert lies_in(decoded, data) or not array.nbytes


@pytest.mark.parametrize("change", ["another function", "more of it", "a shorter head", "a longer head"])
def test_what_only_begins_like_an_array_is_unpickled(change: str) -> None:
    from forebay.codecs import _array_in, _stream_of

    stream = _stream_of(b"('<f8', (4,), 'C')")
    assert _array_in(stream) is not None
    changed = {
        "another function": stream.replace(b"_array", b"_tenso"),
        "more of it": stream[:-1] + b"0N.",
        "a shorter head": stream.replace(b"C\x12", b"C\x11"),
        "a longer head": stream.replace(b"C\x12", b"C\xff"),
    }[change]
    assert changed != stream
    assert _array_in(changed) is None


def test_an_array_of_objects_comes_back() -> None:
    array = np.array([{"a": np.arange(3)}, None, 7], dtype=object)
    back = there_and_back("pickle", array)
    assert back[1:].tolist() == [None, 7]
    check_same(back[0]["a"], np.arange(3))


def test_a_subclass_of_array_stays_one() -> None:
    record = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    back = there_and_back("pickle", record)
    assert type(back) is np.recarray
    assert back.a.tolist() == [1]


def test_buffers_of_others_are_out_of_band() -> None:
    value = [pickle.PickleBuffer(b"read-only"), pickle.PickleBuffer(bytearray(b"writable")), b"bytes", bytearray(b"array")]
    record = Record(codec("pickle").encode(value))
    back = codec("pickle").decode(record.data, record.private)
    assert [bytes(b) for b in back] == [b"read-only", b"writable", b"bytes", b"array"]
    assert lies_in(np.frombuffer(back[0], np.uint8), record.data)
    assert lies_in(np.frombuffer(back[1], np.uint8), record.data)


def test_what_cannot_be_pickled_says_why() -> None:
    with pytest.raises(TypeError, match="lock"):
        codec("pickle").encode([np.arange(3), threading.Lock()])


def test_a_class_that_is_gone_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(codec("pickle").encode(Sample(None, 0, {})))
    monkeypatch.delattr(sys.modules[Sample.__module__], "Sample")
    with pytest.raises(AttributeError):
        codec("pickle").decode(record.data, record.private)


def damaged_pickles() -> list[bytes]:
    good = b"".join(bytes(p) for p in codec("pickle").encode([np.arange(100), "text"]))
    return [
        b"",
        good[:10],
        good[:20],
        good[:-1],
        good + b"\0",
        b"\0" * len(good),
        b"x" + good[1:],
        good[:4] + b"\xff\xff\xff\xff" + good[8:],
        good[:8] + b"\xff" * 8 + good[16:],
        good[:16] + b"\xff" * 8 + good[24:],
        good[:24] + b"\xff" * 8 + good[32:],
    ]


def test_a_damaged_object_is_told() -> None:
    for payload in damaged_pickles():
        data = memoryview(payload)
        with pytest.raises(errors.Damaged):
            print(payload[:100], codec("pickle").decode(data, lambda data=data: memoryview(bytearray(data))))


# what is stored


def test_what_was_stored_can_be_read_for_ever() -> None:
    array = np.asfortranarray(np.arange(6, dtype=">u2").reshape(2, 3))
    stored = b"\x01('>u2', (2, 3), 'F')".ljust(64) + bytes.fromhex("000000030001000400020005")
    assert b"".join(bytes(p) for p in codec("numpy").encode(array)) == stored
    check_same(codec("numpy").decode(Record([stored]).data, bytearray), array)

    text = b"\x80\x05(\x8c\x0eforebay.codecs\x8c\x06_array\x93C\x12('|u1', (3,), 'C')\x97\x86RK\x07t."
    front = b"fbp1" + (1).to_bytes(4, "little") + len(text).to_bytes(8, "little") + (6).to_bytes(8, "little")
    stored = (front + text).ljust(128, b"\0") + b"\1\2\3"
    array, label = codec("pickle").decode(Record([stored]).data, bytearray)
    check_same(array, np.array([1, 2, 3], np.uint8))
    assert label == 7


# which codec


class Json:
    name = "text"

    def encode(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def decode(self, data: memoryview) -> Any:
        return json.loads(bytes(data))


class Days:
    def encode(self, value: datetime.date) -> bytearray:
        return bytearray(value.isoformat().encode())

    def decode(self, data: memoryview) -> datetime.date:
        return datetime.date.fromisoformat(str(data, "ascii"))


def test_a_codec_of_ones_own() -> None:
    for made, name, value in [(Json(), "text", {"a": [1]}), (Days(), f"{__name__}.Days", datetime.date(2026, 1, 2))]:
        own = codec(made)
        record = Record(own.encode(value))
        assert own.name == name
        assert own.decode(record.data, record.private) == value
        assert codec(own) is own
        assert pickle.loads(pickle.dumps(own)).name == name


def test_a_codec_that_gives_no_bytes_is_told() -> None:
    bad = Json()
    bad.encode = lambda value: "text"  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(errors.ConfigError, match="not bytes-like"):
        codec(bad).encode(1)


@pytest.mark.parametrize("name", ["raw", "numpy", "arrow", "json", "pickle"])
def test_named_codecs_are_one_object_each(name: str) -> None:
    assert codec(name) is codec(codec(name)) is pickle.loads(pickle.dumps(codec(name)))
    assert codec(name).name == name


class Impostor(Json):
    name = "pickle"


@pytest.mark.parametrize(
    "which", ["jpeg", "", None, 3, b"raw", Json, json, object(), [], Impostor()], ids=lambda which: type(which).__name__
)
def test_what_is_no_codec_is_told(which: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"'raw', 'numpy', 'pytree', 'arrow', 'json', 'pickle'|cannot have the name"):
        codec(which)


# optional packages


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_imported_that_no_value_needs() -> None:
    code = """
from forebay.codecs import codec
for name, value in (("raw", b"abc"), ("pickle", [1, "two", {3: 4.0}])):
    data = memoryview(b"".join(codec(name).encode(value)))
    assert codec(name).decode(data, None) == value
print(sorted({"numpy", "torch"} & set(sys.modules)))"""
    assert child(code) == "[]"


def test_without_numpy() -> None:
    code = """
sys.modules["numpy"] = None
from forebay import errors
from forebay.codecs import codec
data = memoryview(b"".join(codec("pickle").encode([1, "two"])))
assert codec("pickle").decode(data, None) == [1, "two"]
try:
    codec("numpy")
except errors.MissingExtra as error:
    print(error)"""
    assert child(code) == "arrays need NumPy, which is not installed: pip install numpy"


def test_as_bytes_is_flat() -> None:
    assert codecs.as_bytes(memoryview(b"abcdef").cast("B", (2, 3))) == b"abcdef"


# tensors


MANY = MAPPED_FROM // 4
DTYPE_NAMES = ["uint8", "bool", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn"]


def check_same_tensor(new: Any, old: Any, torch: Any) -> None:
    assert type(new) is type(old)
    assert (new.dtype, new.shape, new.stride(), new.requires_grad) == (old.dtype, old.shape, old.stride(), old.requires_grad)
    assert new.is_leaf
    assert torch.equal(new.detach().contiguous().view(-1).view(torch.uint8), old.detach().contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_tensors_come_back(dtype: str, torch: Any) -> None:
    for shape in ((), (0,), (2, 0), (3,), (2, 3, 4), (MANY,), (2, MANY, 2)):
        tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
        record = Record(codec("pickle").encode({"x": tensor, "y": (1, tensor)}))
        back = codec("pickle").decode(record.data, record.private)
        check_same_tensor(back["x"], tensor, torch)
        assert back["y"][1] is back["x"]
        assert back["x"].data_ptr() % ALIGNMENT == 0 or tensor.nbytes < MAPPED_FROM
        assert record.copies == (tensor.nbytes >= MAPPED_FROM)


@pytest.mark.parametrize("size", [4, MANY])
def test_writing_into_a_tensor_changes_nothing_stored(size: int, torch: Any) -> None:
    array = np.arange(size, dtype=np.float32)
    record = Record(codec("pickle").encode((array, torch.from_numpy(array), torch.from_numpy(array * 2))))
    for _ in range(2):
        same, once, twice = codec("pickle").decode(record.data, record.private)
        assert [once.tolist(), twice.tolist()] == [array.tolist(), (array * 2).tolist()]
        once += 1
        twice.zero_()
        assert same.tolist() == array.tolist()
        assert not same.flags.writeable
    assert record.copies == (2 if size == MANY else 0)


def test_a_tensor_over_a_mapped_file(tmp_path: Path, torch: Any) -> None:
    tensor = torch.arange(MANY, dtype=torch.float32)
    file = tmp_path / "segment"
    file.write_bytes(bytes(64) + b"".join(bytes(p) for p in codec("pickle").encode(tensor)))
    before = file.read_bytes()

    def mapped(*, private: bool) -> memoryview:
        with file.open("rb") as f:
            return map_file(f.fileno(), len(before), writable=private, private=private)[64:]

    shared = mapped(private=False)
    back = codec("pickle").decode(shared, lambda: mapped(private=True))
    back += 1
    assert torch.equal(back, tensor + 1)
    assert file.read_bytes() == before == bytes(64) + shared
    check_same_tensor(codec("pickle").decode(shared, lambda: mapped(private=True)), tensor, torch)


@pytest.mark.parametrize("size", [4, MANY])
def test_strides_are_kept_where_nothing_is_between(size: int, torch: Any) -> None:
    images = torch.rand(2, 3, size, 5).to(memory_format=torch.channels_last)
    holes = torch.rand(3, size, 4)[..., ::2]
    wide = torch.rand(1, 3).expand(size, 3)
    turned = torch.rand(size, 3).T
    conjugate = torch.rand(size, dtype=torch.complex64).conj()
    new = there_and_back("pickle", [images, images[1:], holes, wide, turned, conjugate])
    for a, b in zip(new, [images, images[1:], holes.contiguous(), wide.contiguous(), turned, conjugate.resolve_conj()], strict=True):
        check_same_tensor(a, b, torch)


@pytest.mark.parametrize("size", [4, MANY])
def test_gradients_are_kept(size: int, torch: Any) -> None:
    layer = torch.nn.Linear(size, 2)
    frozen = torch.nn.Parameter(torch.rand(size), requires_grad=False)
    leaf = torch.rand(size, requires_grad=True)
    new = there_and_back("pickle", (layer, frozen, leaf))
    check_same_tensor(new[0].weight, layer.weight, torch)
    check_same_tensor(new[1], frozen, torch)
    check_same_tensor(new[2], leaf, torch)
    new[2].sum().backward()
    assert new[2].grad.tolist() == [1.0] * size


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of quantized tensors
def test_other_tensors_are_left_to_torch(torch: Any) -> None:
    class_of = torch.rand(3)
    class_of.label = "dog"
    sparse, quantized = torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)
    new = there_and_back("pickle", [class_of, sparse, quantized, torch.device("cpu"), torch.float32])
    assert new[0].label == "dog"
    assert torch.equal(new[1].to_dense(), torch.eye(3))
    assert torch.equal(new[2].dequantize(), quantized.dequantize())
    assert new[3:] == [torch.device("cpu"), torch.float32]
