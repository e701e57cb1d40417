"""Items of a dataset by index, decoded or fetched once for all processes of the node, and stored."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import re
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, SupportsIndex

from forebay import _config, codecs, errors
from forebay._engine.packs.pack import Pack, Unencodable
from forebay._engine.store import Store
from forebay._kernel import interrupts, waits
from forebay._kernel.interrupts import guarded, guarded_methods, items_of_program, of_program, unless_of_handler
from forebay._logs import logger
from forebay._model import SAMPLES, Buffer, Entry, Item, exact_str, noted
from forebay.fetch import Fetcher
from forebay.fetch.flight import get_or_make, get_or_make_free

if TYPE_CHECKING:
    from forebay._engine.flight import KeyHold

log = logger("forebay.samples")
AT_ONCE = 4096
"""Slots that are locked at once: the time that the kernel takes for it grows with the square of their number."""


class _MovedFunction:
    """Replaces a method that is now a function elsewhere: the AttributeError names the function."""

    def __init__(self, function: str) -> None:
        self._function = function

    def __get__(self, handle: object, kind: type) -> NoReturn:
        raise AttributeError(f"this is a function of its own: {self._function}")


class NoPack:
    """A pack without records, for an array that cannot be opened.

    ``find_pack``: opens the array in a later call of a handle, after a second, then with growing pauses; ``fingerprint``: of the array."""

    frozen, admits, is_lost = True, False, False

    def __init__(
        self, length: int, id: int = 0, find_pack: Callable[[], Pack | None] | None = None, fingerprint: str | bytes | None = None
    ) -> None:
        self.length, self.id, self.find_pack, self.fingerprint = length, id, find_pack, fingerprint
        self.closed, self._turn = False, waits.Turn()
        self.handles: _Handles | None = None
        self._found: Pack | NoPack | None = None

    def present(self) -> Pack | NoPack:
        """See `Pack.present`: the array, once it is open."""
        pack: Pack | NoPack = self if self._found is None else self._found.present()
        return pack

    def has(self, slot: int) -> bool:
        if self.closed:
            raise errors.Closed.of("array of samples")
        if not 0 <= operator.index(slot) < self.length:
            raise IndexError(f"sample {slot} is outside 0..{self.length - 1}")
        if self.find_pack is not None:
            guarded(self._turn.attempt)(self._open)
        return False

    def _open(self) -> NoPack | Pack | None:
        assert self.find_pack is not None
        try:
            pack = self.find_pack()
        except errors.ConfigError as error:  # another array now has this name: no `get` may fail because of it
            log.warning("nothing is found in this array, and nothing is stored: %s", str(error))
            return self
        if pack is not None:
            self._found = pack
            if self.handles is not None:
                self.handles.take_up(pack)
            if self.closed:  # T1 opens the array / T2 closes the handle, which has none yet / T1 gives the handle the array
                pack.close()
        return pack

    def find(self, slot: int, copy: bool = False) -> None:
        self.has(slot)

    peek = find

    def finder(self) -> Callable[[int, bool], None]:
        return self.find

    def is_damaged(self, slot: int) -> bool:
        return False

    def private(self, slot: int, payload: memoryview) -> memoryview:
        raise IndexError(f"sample {slot} is empty")

    def filled(self) -> list[int]:
        self.has(0)
        return []

    bad_slots = filled

    def count(self) -> int:
        return len(self.filled())

    def put(self, slot: int, encode: Callable[[Any], Any], value: Any) -> bool:
        return self.has(slot)

    def freeze(self) -> None:
        self.has(0)

    def flush_counts(self) -> None:
        """Nothing was counted."""

    def close(self) -> None:
        self.closed = True


class _Handles:
    """The handles of one array in this process, which all use the same pack. Where its root is lost, they go on with another one: the
    array of this name in the root that is there then, found or made as by `open_samples`; without a name, a new array of this process.

    ``name``: of the array; None: it has none."""

    def __init__(self, fetcher: Fetcher, name: str | None) -> None:
        self.name, self._fetcher = name, fetcher
        self._handles: weakref.WeakValueDictionary[int, Samples[Any]] = weakref.WeakValueDictionary()

    def add(self, handle: Samples[Any]) -> None:
        self._handles[id(handle)] = handle

    def take_up(self, pack: Pack | NoPack) -> None:
        """Let every handle use this pack."""
        pack.handles = self
        for known in self._handles.valuerefs():
            if (handle := known()) is not None:
                handle._attach(pack)

    def replacement(self, lost: Pack) -> Pack | NoPack:
        """The pack to use in place of one whose root is lost. One that cannot be opened now is opened by a later call."""
        shape, name, fetcher = _Shape.of(lost.lease.entry), self.name, self._fetcher
        if shape is None or (name is None and lost.only_reads):
            return NoPack(lost.length, lost.id)

        def find() -> Pack | None:
            if name is None or not lost.only_reads:
                return _find_or_make(fetcher, name, shape)
            pack = _find(fetcher, name, shape)
            if pack is not None:
                pack.only_read()
            return pack

        def find_pack() -> Pack | None:
            return _found_or_none(fetcher, name, find, lost.quota or None)

        try:
            with waits.time_limit(fetcher.timeout):
                pack = find_pack()
        except errors.ConfigError as error:  # as in `NoPack`
            log.warning("nothing is found in this array, and nothing is stored: %s", str(error))
            return NoPack(lost.length, lost.id)
        return pack or NoPack(lost.length, lost.id, find_pack)


@guarded_methods("get", "get_or_put", "closed", "__len__")
class Samples(Generic[Item]):
    """An array of slots that any process fills and reads. Created by `Cache.samples`.

    Callable from any thread; usable in both processes after a fork; unpickled in another process, it is the same array. Returned items stay
    valid after `close` and after an eviction; any other call after `close` raises `Closed`."""

    def __init__(
        self, fetcher: Fetcher, pack: Pack | NoPack, codec: codecs.Codec, name: str | None, *, copy: bool = False,
        handles: _Handles | None = None,
    ) -> None:  # fmt: skip
        self._fetcher, self._codec, self._copy = fetcher, codec, copy
        self._warned: set[str] = set()
        self._creator = os.getpid()
        self.name = name
        self._join(handles or _Handles(fetcher, name), pack)

    def _join(self, handles: _Handles, pack: Pack | NoPack) -> None:
        """Use a pack, and what replaces it, together with the other handles of the array."""
        self._handles = pack.handles = handles
        handles.add(self)
        self._attach(pack)

    def _attach(self, pack: Pack | NoPack) -> None:
        self._opened, self._find = pack, pack.finder()
        if self._codec.name == "raw" and not self._copy and isinstance(pack, Pack):
            self.get = self._find  # type: ignore[method-assign, assignment]  # saves a call on the path that runs a million times a second
        else:
            vars(self).pop("get", None)

    @property
    def _pack(self) -> Pack | NoPack:
        """The array; once its root is lost, the one in the root that is there now."""
        pack: Pack | NoPack = self._opened.present() if self._opened.is_lost else self._opened
        return pack

    def writable(self) -> Samples[Item]:
        """The same array, with items whose arrays are private to the caller and writable. Closing one handle closes both. With the codec
        ``raw``, whose items have no arrays, returns this handle."""
        if self._copy or self._codec.name == "raw":
            return self
        return Samples(self._fetcher, self._pack, self._codec, self.name, copy=True, handles=self._handles)

    def __reduce__(self) -> tuple[Any, ...]:
        pack = self._pack
        if isinstance(pack, NoPack) and pack.find_pack is not None and not pack.id:
            options: dict[str, Any] = {"codec": self._codec, "fingerprint": pack.fingerprint, "copy": self._copy}
            return functools.partial(open_samples, **options), (self._fetcher, self.name, len(self))
        return _unpickle, (self._fetcher, pack.id, len(self), self._codec, self.name, self._copy)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "frozen" if self.frozen else f"{self.filled:,} filled"
        return f"<forebay.Samples {self.name or 'without a name'}: {len(self):,} slots, {state}>"

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, i: int, copy: bool = False) -> Item | None:
        """The item in slot ``i``; None if it is empty. Takes no lock and no system call once this process has read the slot.

        With the codec ``raw``, items are read-only memoryviews of the mapping; arrays are read-only views of it. ``copy``: return a
        private, writable copy. Raises IndexError for a slot outside 0..N-1, and `Closed`."""
        copy = copy or self._copy
        data = self._find(i, copy)
        if data is None:
            return None
        decoded = self._decoded(i, data)
        return None if decoded is None else decoded[0]

    def get_many(self, indices: Iterable[int]) -> list[Item | None]:
        """The items of these slots, as `get` returns them."""
        get = self.get
        items = [get(i) for i in items_of_program(indices)]
        self._pack.flush_counts()
        return items

    def get_or_put(self, i: int, fn: Callable[[], Item | Buffer], *, timeout: float | None = None) -> Item:
        """The item in slot ``i``; else the result of ``fn``, which is stored: one process of the node at a time runs it for a slot.

        Returns the item as `get` does. An error that ``fn`` raises reaches every process that waited; a `RemoteError` only those with the
        same `RemoteOptions`. If nothing more can be stored, ``fn`` runs here at once. ``timeout``: seconds to wait for another process.
        Raises `ConfigError` if the codec rejects a value."""
        decoded = self._decoded(i, self._find(i, self._copy))
        return decoded[0] if decoded is not None else self._make(i, fn, timeout)

    @guarded
    def _make(self, i: int, fn: Callable[[], Item | Buffer], timeout: float | None) -> Item:
        timeout = _config.parse_timeout(timeout)
        if not self._pack.admits:
            return self._store_and_read(i, of_program(fn)())[0]

        def make() -> tuple[Any]:
            return (of_program(fn)(),)

        item: Item = get_or_make(
            self._fetcher, SAMPLES, f"{self._pack.id:x}/{i}", lambda: self._look(i), make, lambda value: self._store_and_read(i, value[0]),
            past=lambda value: (self._as_read(value[0]),), label=f"sample {i} of {self._label}",
            timeout=self._fetcher.timeout if timeout is None else timeout, looked=True,
        )[0]  # fmt: skip
        return item

    def get_or_put_many(
        self, indices: Iterable[SupportsIndex], fn: Callable[[list[int]], Sequence[Item | Buffer]], *, timeout: float | None = None
    ) -> list[Item]:
        """The items of these slots, in this order, as `get` returns them. One call of ``fn(slots)`` makes all missing items, and they are
        stored; a slot that is named twice is passed once. Of more than 4,096 missing items, each call makes up to 4,096.

        Slots that another process is making come last, when this call holds none: that process makes them, or `get_or_put` calls
        ``fn([slot])`` here. An error of ``fn`` is raised here, and nothing of its call is stored; a process that waits for one of these
        slots makes the item itself. ``timeout``: total seconds to wait for others. Raises `ConfigError` as `get_or_put` does, and
        ValueError if ``fn`` returns another number of values."""
        slots = [operator.index(i) for i in items_of_program(indices)]
        timeout = self._fetcher.timeout if timeout is None else _config.parse_timeout(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        items: dict[int, tuple[Item]] = {}
        wanted = interrupts.paced(dict.fromkeys(slots))
        missing = [i for i in wanted if not _added(items, i, self._decoded(i, self._find(i, self._copy)))]
        while missing:
            with waits.time_limit(timeout):
                groups = [missing[at : at + AT_ONCE] for at in range(0, len(missing), AT_ONCE)]
                busy = [i for group in groups for i in self._make_free(group, fn, items)]
            if len(busy) == len(missing):  # others have all of them. This call holds none, so no process waits for it meanwhile.
                i = busy.pop(0)
                left = None if until is None else max(until - time.monotonic(), 0.0)
                items[i] = (self.get_or_put(i, lambda i=i: _checked(fn([i]), 1)[0], timeout=left),)  # type: ignore[misc]
            missing = busy
        self._pack.flush_counts()
        return [items[i][0] for i in slots]

    def _make_free(
        self, missing: Sequence[int], fn: Callable[[list[int]], Sequence[Item | Buffer]], items: dict[int, tuple[Item]]
    ) -> list[int]:
        """Add the items of those slots that no other process is making. Returns the others."""
        keys = {f"{self._pack.id:x}/{i}": i for i in missing}

        def make(missing: Sequence[str], holds: Mapping[str, KeyHold]) -> dict[str, tuple[Item]]:
            free = [keys[key] for key in missing]
            with waits.time_limit(None, afresh=True):  # the time limit is for the cache, not for the function
                values = _checked(of_program(fn)(free), len(free))
            is_stored, made = holds or not self._pack.admits, dict[str, tuple[Item]]()
            for key, i, value in zip(missing, free, values, strict=True):
                interrupts.point()
                made[key] = self._store_and_read(i, value) if is_stored else (self._as_read(value),)
                if key in holds:
                    holds[key].release()
            return made

        if self._pack.admits:
            label = f"samples of {self._label}"
            found = get_or_make_free(self._fetcher, SAMPLES, list(keys), lambda key: self._look(keys[key]), make, label=label)
        else:
            found = make(list(keys), {})
        items |= {keys[key]: item for key, item in found.items()}
        return [i for i in missing if i not in items]

    def _look(self, i: int) -> tuple[Item] | None:
        return self._decoded(i, self._pack.peek(i, self._copy))

    def _decoded(self, i: int, data: memoryview | None) -> tuple[Item] | None:
        """The item in a tuple, since a stored item may be None."""
        if data is None:
            return None
        try:
            return (self._codec.decode(data, lambda: self._private(i, data) if data.readonly else data),)
        except unless_of_handler(Exception):
            if guarded(self._pack.is_damaged)(i):
                return None
            raise  # the error of the codec itself

    @guarded
    def _private(self, i: int, data: memoryview) -> memoryview:
        try:
            return self._pack.private(i, data)
        except OSError:  # the process has as many mappings, or files, as it may have
            return memoryview(bytearray(data))

    def _store_and_read(self, i: int, value: Any) -> tuple[Item]:
        """Store a value, if possible; return it as the next reader will get it, if it can be encoded."""
        encoded: list[Sequence[Buffer]] = []

        def encode(value: Any) -> Sequence[Buffer]:
            encoded.append(self._codec.encode(value))
            return encoded[0]

        try:
            self._pack.put(i, encode, value)
        except Unencodable as error:
            self._tell(i, error)
            return (value,)
        except errors.CacheFault as error:
            self._tell(i, error)
        stored = self._look(i)
        return stored if stored is not None else (self._as_read(value, encoded[0] if encoded else None),)

    def _as_read(self, value: Any, pieces: Sequence[Buffer] | None = None) -> Any:
        """A value that is not stored, as it would be read if it were: a program gets the same whether there was room or not."""
        try:
            whole = bytearray(b"".join(self._codec.encode(value) if pieces is None else pieces))
        except errors.ConfigError:
            raise
        except Exception:  # noqa: BLE001  # whatever the code of the value raises
            return value  # it cannot be stored
        data = memoryview(whole) if self._copy else memoryview(whole).toreadonly()
        return self._codec.decode(data, lambda: memoryview(whole))

    def __len__(self) -> int:
        return self._opened.length

    def __contains__(self, i: object) -> bool:
        return isinstance(i, SupportsIndex) and 0 <= operator.index(i) < len(self) and self._pack.has(operator.index(i))

    def __iter__(self) -> Iterator[int]:
        """The filled slots, in order."""
        return iter(self._pack.filled())

    @property
    def filled(self) -> int:
        """The number of filled slots."""
        return self._pack.count()

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, i: int, value: Item | Buffer) -> bool:
        """Fill slot ``i``. Returns False if it is full, the array is frozen, or there is no room (logged once).

        If several calls fill one slot at once, one succeeds. Raises IndexError, `Closed`, and `ConfigError` if the codec rejects the value.
        """
        try:
            with waits.time_limit(self._fetcher.timeout):
                return self._pack.put(i, self._codec.encode, value)
        except (errors.CacheFault, Unencodable) as error:
            self._tell(i, error)
            return False

    def _tell(self, i: int, error: Exception) -> None:
        """Count and warn that an item is not stored: one warning for each kind of error."""
        if isinstance(error, errors.NoSpace) and error.limit == "budget":  # as `freeze` intends: at the end of many a first epoch
            self._fetcher.warn(f"samples {self._label}", "%s takes nothing more for now, and keeps what it has: %s", self._label, error)
            self._fetcher.store.count("store_failures")
        elif isinstance(error, errors.NoSpace):
            self._warn("full", f"{self._label} takes nothing more for now, and keeps what it has: {error}")
        elif isinstance(error, errors.CacheFault):
            self._warn("full", f"sample {i} of {self._label} is not stored: {error}")  # also of the catalog
        else:
            self._warn("encode", f"sample {i} of {self._label} cannot be stored: {error}")

    def _warn(self, kind: str, message: str) -> None:
        self._fetcher.store.count("store_failures")
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    @property
    def frozen(self) -> bool:
        """Whether nothing more is admitted, even if there is room."""
        return self._pack.frozen

    def freeze(self) -> None:
        """Admit nothing more, from any process, permanently."""
        self._pack.freeze()

    # -- names -----------------------------------------------------------------------------------------------------

    def preserve(self, name: str, overwrite: bool = False) -> bool:
        """Name an unnamed array, so that later jobs can open it, and freeze it. Copies nothing.

        Returns False if the name is taken, unless ``overwrite``: the old array is then removed once no process has it open. Raises
        RuntimeError in any process except the one that created this handle."""
        self._check_creator("preserve")
        self._pack.has(0)  # raises Closed
        if self.name is not None:
            raise errors.ConfigError(f"this array already has a name: {self.name!r}", name="name", value=name)
        name = _checked_name(name)
        if isinstance(self._pack, NoPack):
            return False
        try:
            named = self._store().packs.name(self._pack, SAMPLES, name, overwrite=overwrite)
        except errors.CacheFault as error:
            self._warn("fault", f"{self._label} cannot be called {name!r}: {error}")
            return False
        if named:
            self.freeze()
            self.name = self._handles.name = name
        return named

    def preload(self, name: str) -> bool:
        """Open the array of this name read-only, in place of this handle's array. Returns False if there is none, or this handle is already
        frozen. Raises ValueError if it has another length or codec, and RuntimeError except in the process that created this handle."""
        self._check_creator("preload")
        self._pack.has(0)
        if self.frozen:
            return False
        name = _checked_name(name)
        pack = _find(self._fetcher, name, _Shape(len(self), self._codec.name, None))
        if pack is None:
            return False
        self.close()
        pack.only_read()
        self.name = name
        self._join(_Handles(self._fetcher, name), pack)
        return True

    def _check_creator(self, what: str) -> None:
        if self._creator != os.getpid():
            message = f"{what} can be called only in the process that created this handle ({self._creator}); this is {os.getpid()}"
            raise RuntimeError(message)

    import_pfio = _MovedFunction("forebay.adapters.pfio.import_pfio(path, name, cache=None)")

    def verify(self) -> list[int]:
        """Compare every sample with its checksum; empty damaged slots, so that they are filled again, and return them."""
        return self._pack.bad_slots()

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this handle or its cache was closed."""
        return self._opened.closed

    def close(self) -> None:
        """Release the array. An unnamed array is removed when the last process that has it calls this, or ends."""
        while not (pack := self._opened).closed:  # again: another thread may have put another one in place of a lost one
            try:
                pack.close()
                if self.name is None and isinstance(pack, Pack) and not pack.is_lost:
                    self._store().drop([pack.lease.entry])
            except errors.CacheFault as error:
                log.warning("closing %s: %s", self._label, str(error))

    def __enter__(self) -> Self:
        self._pack.has(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _store(self) -> Store:
        """The store of a pack: a `NullStore` has none."""
        assert self._fetcher.store.keeps
        return self._fetcher.store

    @property
    def _label(self) -> str:
        return f"the array {self.name!r}" if self.name else "an array without a name"


def _added(items: dict[int, tuple[Item]], i: int, item: tuple[Item] | None) -> bool:
    """Whether there is an item; then it is added."""
    if item is not None:
        items[i] = item
    return item is not None


def _checked(values: Sequence[Item], count: int) -> Sequence[Item]:
    if len(values) != count:
        raise ValueError(f"the function returned {len(values):,} values for {count:,} slots")
    return values


# -- opening -----------------------------------------------------------------------------------------------------------


@guarded
def open_samples(
    fetcher: Fetcher, name: str | None, length: int | None, *, codec: Any, fingerprint: str | bytes | None, quota: int | str | None = None,
    copy: bool = False,
) -> Samples[Any]:  # fmt: skip
    """See `Cache.samples`."""
    chosen = codecs.codec(codec)
    if name is not None:
        name = _checked_name(name)
    elif length is None:
        raise errors.ConfigError("an array without a name needs a length: cache.samples(length=N)", name="length", value=None)
    if length is not None:
        if not (isinstance(length, int) and length >= 1):
            raise errors.ConfigError(f"length={length!r} is invalid: it must be an int of at least 1", name="length", value=length)
        length = int.__index__(length)
    shape = _Shape(length or 0, chosen.name, _digest_of(fingerprint))

    def find_pack() -> Pack | None:
        return _found_or_none(fetcher, name, lambda: _find_or_make(fetcher, name, shape), quota)

    with waits.time_limit(fetcher.timeout):
        pack = find_pack()
    if pack is None and not length:
        raise errors.NotCached.of(f"{SAMPLES}:{name}")
    may_come = fetcher.store.keeps or fetcher.reopening is not None
    none = NoPack(shape.length, find_pack=find_pack if may_come else None, fingerprint=fingerprint)
    samples = Samples[Any](fetcher, pack or none, chosen, name, copy=copy)
    fetcher.register(samples)
    return samples


def _found_or_none(fetcher: Fetcher, name: str | None, find: Callable[[], Pack | None], quota: int | str | None) -> Pack | None:
    """The pack that ``find`` opens, with this quota, if one is given. None where the cache fails. Raises `ConfigError`."""
    fetcher.current()
    try:
        pack = find()
    except (errors.CacheFault, errors.WaitTimeout) as error:
        fetcher.fall_back(error, f"samples:{name or ''}")
        return None
    if pack is not None and quota is not None:
        pack.set_quota(_config.parse_size(quota, total=fetcher.store.spaces.budget(), name="quota"))
    return pack


@guarded
def _unpickle(fetcher: Fetcher, id: int, length: int, codec: codecs.Codec, name: str | None, copy: bool) -> Samples[Any]:
    """Unpickle a handle from another process: of the same array, whatever its name is now."""

    def find(store: Store) -> Pack | None:
        lease = store.packs.find_by_id(id)
        return None if lease is None else store.packs.open(lease, length)

    pack: Pack | None = None
    try:
        pack = find(fetcher.store) if fetcher.store.keeps else None
    except errors.CacheFault as error:
        fetcher.fall_back(error, f"samples:{name or ''}")
    if pack is None and fetcher.upstream is not None:
        pack = fetcher.upstream.ask(find)
    if pack is None:
        log.warning("the array of an unpickled handle is gone: the handle is empty, and stores nothing")
    samples = Samples[Any](fetcher, pack or NoPack(length, id), codec, name, copy=copy)
    samples._creator = 0
    return samples


# -- arrays by their names ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """The properties that an array must have to be opened again: number of slots, codec, and fingerprint of the source."""

    length: int
    codec: str
    fingerprint: str | None

    @classmethod
    def of(cls, entry: Entry) -> _Shape | None:
        """The shape noted in an entry; None if the note is not one of an array."""
        known = noted(entry.meta, length=int, codec=str)
        return cls(known["length"], known["codec"], entry.validator) if known and known["length"] > 0 else None

    def meta(self) -> str:
        return json.dumps({"length": self.length, "codec": self.codec})


def _find_or_make(fetcher: Fetcher, name: str | None, shape: _Shape) -> Pack | None:
    """The array of this name; created if there is none, or it has another fingerprint. Without a name, a new one. None where none can be
    created."""
    store = fetcher.store
    if not store.keeps:
        return _find(fetcher, name, shape) if name is not None else None
    if name is None:
        key = f"~{secrets.token_hex(8)}"
        return store.packs.make(SAMPLES, key, shape.length, life="held", fingerprint=shape.fingerprint, meta=shape.meta())
    pack = _find(fetcher, name, shape)
    if pack is not None or not shape.length:
        return pack
    # A name such as `5f/3` is that of the lock of a slot, which may be held by the caller: it makes the item of this slot.
    hold = store.locks.hold(SAMPLES, f"~{name}" if re.fullmatch("[0-9a-f]+/[0-9]+", name) else name)
    try:
        # P1 sees none / P2 sees none / P1 holds the key, creates it, releases / P2 holds the key: we are here.
        pack = _find(fetcher, name, shape)
        return pack or store.packs.make(SAMPLES, name, shape.length, fingerprint=shape.fingerprint, meta=shape.meta())
    finally:
        hold.release()


def _find(fetcher: Fetcher, name: str, shape: _Shape) -> Pack | None:
    """The array of this name, here or in the root upstream; None if there is none, or it has another fingerprint.

    A length of 0 accepts any. Raises `ConfigError` where it has another length or codec."""
    pack = _find_in(fetcher.store, name, shape) if fetcher.store.keeps else None
    if pack is None and fetcher.upstream is not None:
        pack = fetcher.upstream.ask(lambda above: _find_in(above, name, shape))
        if pack is not None:
            pack.only_read()
    return pack


def _find_in(store: Store, name: str, shape: _Shape) -> Pack | None:
    lease = store.packs.find(SAMPLES, name)
    if lease is None:
        return None
    stored = _Shape.of(lease.entry)
    if stored is None:
        store.set_aside(lease.entry, f"{lease.entry.name}: its notes on length and codec are invalid")
        lease.close()
        return None
    if shape.fingerprint is not None and shape.fingerprint != stored.fingerprint:
        lease.close()
        return None
    if (shape.length or stored.length, shape.codec) != (stored.length, stored.codec):
        lease.close()
        raise errors.ConfigError(
            f"the array {name!r} has {stored.length:,} slots of the codec {stored.codec!r}, but {shape.length:,} of {shape.codec!r} "
            "were requested: choose another name, or give another fingerprint, which starts a new array",
            name="length", value=shape.length, found=stored.length,
        )  # fmt: skip
    return store.packs.open(lease, stored.length)


def _checked_name(name: str) -> str:
    """The name as an exact str, if an array can have it. Raises `ConfigError`."""
    text = exact_str(name)
    if not text or text.startswith("~") or not text.isprintable():
        message = f"an array cannot be called {name!r}: a name is a str, not empty, without '~' at its begin"
        raise errors.ConfigError(message, name="name", value=repr(name))
    return text


def _digest_of(fingerprint: str | bytes | None) -> str | None:
    """A fingerprint in its stored form."""
    if fingerprint is None:
        return None
    text = exact_str(fingerprint)
    data: Any = fingerprint if text is None else text
    try:
        return hashlib.sha256(data.encode() if text is not None else data).hexdigest()
    except (TypeError, ValueError, BufferError) as error:
        message = f"the fingerprint {fingerprint!r} cannot be used: it is a str of valid unicode, or bytes"
        raise errors.ConfigError(message, name="fingerprint", value=repr(fingerprint)) from error
