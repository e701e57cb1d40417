"""The words that all rooms share: frozen types, and the two protocols between the engine and the remotes."""

from __future__ import annotations

import enum
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, runtime_checkable

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # every type checker has it; defaults came into `typing` with Python 3.13

    Item = TypeVar("Item", default=Any)
    Item_co = TypeVar("Item_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    Item, Item_co = TypeVar("Item"), TypeVar("Item_co", covariant=True)

Buffer: TypeAlias = bytes | bytearray | memoryview
Content: TypeAlias = Buffer | str | os.PathLike[str]
"""What is written: bytes, or the path of a local file."""


def is_text(value: str) -> bool:
    """Whether a str is whole Unicode: without lone surrogates, which UTF-8, and so a key, cannot hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Policy(enum.StrEnum):
    """What a space does when its bytes do not fit."""

    LRU = "lru"
    """Evict its least recently used entries."""
    FREEZE = "freeze"
    """Evict none of its own, admit nothing more."""
    WAIT = "wait"
    """Evict what nobody holds, least recently used first; wait while all is held."""

    @property
    def evicts_own(self) -> bool:
        """Whether a new entry may take the place of an older one of the same space."""
        return self is not Policy.FREEZE

    @classmethod
    def parse(cls, name: str) -> Policy:
        """The policy that is called ``name``. Raises `ConfigError`."""
        try:
            return cls(name.lower())
        except ValueError as error:
            raise ConfigError(f"there is no policy {name!r}: use one of {', '.join(cls)}", value=name) from error


class Codec(Protocol[Item]):
    """A codec of a program's own, for `Cache.samples`, `Cache.tasks` and `Cache.prefetcher`.

    ``name``, if it has one that is a str, is stored with the values, else the name of its class: another name is another codec. It is
    called from any thread, and pickled along with what uses it."""

    def encode(self, value: Item, /) -> Buffer:
        """The bytes that are stored for a value."""

    def decode(self, data: memoryview, /) -> Item:
        """The value of such bytes. ``data`` is read-only and stays good as long as anything refers to it."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """``length`` bytes from ``start``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a remote says of an object.

    ``size``: bytes, None where the remote does not say. ``validator``: the ETag as sent (quotes and ``W/`` included), else
    ``mtime-size``, else None. ``strong``: equal validators mean equal bytes, so a partial can be resumed.
    ``modified``: seconds since 1970, or None.
    """

    url: str
    size: int | None
    validator: str | None = None
    strong: bool = False
    modified: float | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """What an earlier fetch left: a fetch may go on from it while the remote still has this validator and this size."""

    size: int
    validator: str
    missing: tuple[Span, ...]


@dataclass(slots=True)
class Transfer:
    """What a remote did for one call: counted, and shown to the user."""

    requests: int = 0
    received: int = 0
    retries: int = 0
    resumed: int = 0
    info: ObjectInfo | None = None


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Where an item comes from. ``uri``: of the dataset; ``key``: of the item in it; ``shard``: the shard that holds it, if any;
    ``files``: the names of its files."""

    uri: str
    key: str
    shard: str | None = None
    files: tuple[str, ...] = ()


class Source(Protocol):
    """Items under string keys, as bytes. Any object with these two is one; it must be callable from several threads, and picklable
    where spawned workers are to use it.

    What else it may have, and what for:

    - ``version``: str or None. Other items under the same keys have another one. Items of a source without it, and without
      ``version_of``, are kept no longer than the processes that use them.
    - ``version_of(key)``: str or None. The version of one item, where that is cheap to tell.
    - ``size(key)``: int or None. The bytes of an item, so that room is reserved before it is read.
    - ``info(key)``: `SourceInfo`.
    - ``lease(key)``: a `Lease` on the item's bytes where the cache has them as they are, from `Cache.read` or a `pull`; else None. They
      are given a second name then, and not read.
    - ``fetch(key)``: as ``source[key]``, asked for what ``lease`` has not given.
    - ``bind(origin)``: called once with the cache's own `Origin`, before the first item is asked for."""

    @property
    def uri(self) -> str:
        """Names the dataset, in keys and in provenance. Without secrets."""
        ...

    def __getitem__(self, key: str, /) -> bytes:
        """The item's bytes. What is raised reaches everybody who asked for it."""
        ...


class Sink(Protocol):
    """Where a remote puts the bytes of one object. Made by the engine or by `PassThrough`; used by one fetch."""

    partial: Partial | None
    """Set where an earlier fetch left something that can be resumed."""

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """The remote answered: reserve the room and give the spans that are wanted.

        Called once per fetch that goes well, again (with the new info) when the object changed meanwhile: what was written
        before is then void. ``info.size`` None: one span of length -1, the room grows as the bytes come.
        Raises `NoSpace` when the object cannot be kept: the remote lets it pass."""

    def write(self, offset: int, data: Buffer) -> None:
        """Put ``data`` at ``offset``. From several threads at once for different spans; in order within a span."""


@runtime_checkable
class CloningSink(Sink, Protocol):
    """A sink that may share the blocks of a file of this host, instead of being given its bytes."""

    def clone(self, fd: int) -> bool:
        """Take all bytes of the open file ``fd``, which has the size that `begin` was told. False where that cannot be: write them."""


class BufferSink:
    """A sink in memory: what a fetch fills where the cache cannot keep the bytes, or need not. ``data``: what came.

    Memory grows as bytes come, whatever size the remote claims. ``most``: returns how many bytes an object may have that comes compressed,
    None for no limit; the code that decompresses it asks. Callable from any thread."""

    def __init__(self, most: Callable[[], int] | None = None) -> None:
        self.most = most
        self._growing = threading.Lock()  # two ranges that come at once may both lie behind the end
        self.partial: Partial | None = None
        self.info: ObjectInfo | None = None
        self.data = bytearray()

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self.info = info
        self.data = bytearray()
        return (Span(0, -1 if info.size is None else info.size),)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        with self._growing:
            if offset > len(self.data):
                self.data += bytes(offset - len(self.data))
            self.data[offset : offset + len(data)] = data


class Remote(Protocol):
    """A kind of place where bytes come from. Callable from several threads and after a fork."""

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """What the remote says of the object; None if its validator is still ``known``. Raises `RemoteError`."""

    def fetch(self, url: str, sink: Sink) -> Transfer:
        """Bring the whole object (or what `Sink.partial` lacks) into ``sink``. Retries, resumes, checks lengths.
        Raises `RemoteError`, or what ``sink`` raises. Caller: holds no lock but this key's own."""

    def read(self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None) -> bytes:
        """Exactly the bytes of ``span`` (less only where the object ends); `RemoteChanged` if ``validator`` is given and gone.

        ``info``: what the remote said of the object before. Its validator counts as ``validator``, and what else it tells where an answer
        has nothing to compare a validator with."""

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All objects whose URL begins with ``url``, in order of name."""

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """Put ``source`` there as a whole object, in place of the one that is there. A file is never in memory whole.

        ``if_none_match="*"``: only where there is no object yet; ``if_match``: only over the one with this validator; else `Conflict`,
        or `Unsupported` where the place knows no such condition. A write whose answer was lost is sent again: under a condition it
        then fails, though the object is there. ``on_sent`` is told, from any thread, how many bytes are sent so far (fewer than before
        where some are sent again); what it raises ends the write. ``resume``: where a large object is sent in parts (S3), those that came
        stay there when the write fails, and the next write of it with ``resume`` goes on from them. Raises `RemoteError`,
        `SourceChanged`, or what reading the source raises."""

    def delete(self, url: str) -> None:
        """Remove the object; that there is none is no error. Raises `RemoteError`."""


class Noted(bytes):
    """The bytes of an item, and a short text that its entry carries beside them: in its row, so that it counts against no quota."""

    note: str = ""

    @classmethod
    def of(cls, data: Buffer, note: str) -> Self:
        value = cls(data)
        value.note = note
        return value


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one key in one space, with bytes of its own.

    ``size``: bytes stored. ``charge``: bytes counted against the budget (whole blocks). ``kind``: ``blob``, ``value``,
    ``tree`` or ``pack``. ``life``: ``cached``, ``pinned`` or ``held``. ``checksum``: xxh3-128 over the xxh3-128 of
    each 8 MiB. Times in seconds since 1970.
    """

    id: int
    space: str
    key: str
    kind: str
    size: int
    charge: int
    slot: int
    checksum: bytes
    validator: str | None
    created: float
    boot: str
    life: str
    suffix: str = ""
    meta: str = ""
    used: float = 0.0
    validated: float = 0.0
    leased: bool = False

    @property
    def name(self) -> str:
        """What the command line takes: the URL, or ``space:key``."""
        return self.key if self.space == "urls" else f"{self.space}:{self.key}"


def noted(meta: str, **types: type) -> dict[str, Any] | None:
    """What an entry's ``meta`` says as JSON; None where it is none, or lacks one of the ``wanted`` names with a value of that very type (an
    int: a count): somebody else wrote it."""
    try:
        found = json.loads(meta)
    except (ValueError, RecursionError):
        return None
    if type(found) is not dict:
        return None
    values: list[Any] = [found.get(name) for name in types]
    sound = all(type(value) is kind for value, kind in zip(values, types.values(), strict=True))
    return found if sound and all(0 <= value < 1 << 48 for value in values if type(value) is int) else None


@dataclass(frozen=True, slots=True)
class Victim:
    """An entry that a `Plan` would remove."""

    name: str
    size: int
    charge: int
    used: float
    id: int


@dataclass(frozen=True, slots=True)
class Report:
    """What really happened: ``freed`` bytes of ``removed`` entries, and of ``stray_files`` that no entry named; ``spared`` were in use,
    pinned or gone meanwhile."""

    removed: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    freed: int = 0
    stray_files: int = 0


@dataclass(frozen=True, slots=True)
class Strays:
    """What lies in a root and is counted by nobody, in blocks of the disk. ``files``, ``bytes``: of Forebay's making, no entry names them;
    ``foreign``, ``foreign_bytes``: somebody else's, which are left alone."""

    files: int = 0
    bytes: int = 0
    foreign: int = 0
    foreign_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that the check found. ``kind``: a short word; ``subject``: the file, entry or total; ``found``: in words."""

    kind: str
    subject: str
    found: str
    key: str = ""
    id: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.found}"
