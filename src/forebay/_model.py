"""What all packages share: records, the names of spaces, and the protocols between the engine, the sources and the remotes."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard

from forebay.errors import ConfigError, NotBytes

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # type checkers bundle it; `typing.TypeVar` has defaults from Python 3.13 on

    Item = TypeVar("Item", default=Any)
    Item_co = TypeVar("Item_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    Item, Item_co = TypeVar("Item"), TypeVar("Item_co", covariant=True)

OWN_SPACES = URLS, DIRECTORIES, LISTINGS, INDEXES, SAMPLES, SESSIONS = (
    "urls", "directories", "listings", "indexes", "samples", "sessions",
)  # fmt: skip
"""The spaces whose entries only Forebay makes: objects of remotes, trees of links to them, listings of directories, indexes of shards,
arrays of samples, and sessions of prefetchers. Users may limit, read, list and clear these spaces, but store nothing in them."""

VALUES = "values"
"""The space of `Cache.put`."""

Buffer: TypeAlias = bytes | bytearray | memoryview
Content: TypeAlias = Buffer | str | os.PathLike[str]
"""The content of a write: bytes, or the path of a local file."""


def as_bytes(data: Buffer) -> memoryview:
    """A flat view of contiguous bytes. Raises `NotBytes` for anything else."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        todo = "pass text.encode()" if isinstance(data, str) else "pass bytes, bytearray, memoryview or a contiguous array"
        raise NotBytes(f"a {type(data).__name__} is not bytes-like: {todo}", name="data", value="") from error


def to_bytes(data: Buffer) -> bytes:
    """The content as bytes: a copy, unless it is a view of all of a ``bytes`` object, as small files are read into."""
    view = memoryview(data)
    whole = view.obj
    return whole if isinstance(whole, bytes) and view.c_contiguous and view.nbytes == len(whole) else bytes(view)


def is_frozen(data: Buffer) -> bool:
    """Whether nothing can change these bytes any more, so that they can be kept without a copy: bytes, and what pyarrow reads from a
    filesystem in Python."""
    return isinstance(data, bytes) or (isinstance(data, memoryview) and getattr(data.obj, "is_mutable", True) is False)


def exact_str(value: object) -> str | None:
    """The text of a str as one of no subclass; None for what is no str.

    A subclass may have its own ``__eq__`` or ``__hash__``, by which a look-up would find what is stored under another text."""
    if type(value) is str:
        return value
    return str.__str__(value) if issubclass(type(value), str) else None


def is_text(value: str) -> bool:
    """Whether a str has no lone surrogates: UTF-8, and so a key, cannot hold them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_free(name: str) -> None:
    """Raise `ConfigError` if the cache itself uses the space of this name, so that no `Tasks` and no prefetcher can have it."""
    taken = (*OWN_SPACES, VALUES)
    if name in taken:
        message = f"the name {name!r} is taken by the cache itself, as are {', '.join(taken)}: choose another one"
        raise ConfigError(message, name="name", value=name)


class Policy(enum.StrEnum):
    """What a space does when its bytes do not fit."""

    AUTO = "auto"
    """Evict least recently used entries, or new entries before they are used a second time: whichever of the two keeps more of what is
    used."""
    LRU = "lru"
    """Evict its least recently used entries."""
    FREEZE = "freeze"
    """Evict none of its own entries; admit nothing more."""
    WAIT = "wait"
    """Evict entries without a lease, in the order of ``auto``; wait while all are leased."""

    @property
    def evicts_own(self) -> bool:
        """Whether a new entry may evict an older one of the same space."""
        return self is not Policy.FREEZE

    @property
    def adapts(self) -> bool:
        """Whether the order of eviction follows what is used."""
        return self in (Policy.AUTO, Policy.WAIT)

    @classmethod
    def default(cls, space: str) -> Policy:
        """The policy of a space of this name that was given none."""
        return cls.AUTO if space == URLS else cls.LRU

    @classmethod
    def parse(cls, name: str) -> Policy:
        """The policy with this name. Raises `ConfigError`."""
        try:
            return cls((exact_str(name) or str(name)).lower())
        except ValueError as error:
            raise ConfigError(f"unknown policy {name!r}: use one of {', '.join(cls)}", value=name) from error


class Asker(NamedTuple):
    """A caller that gets the value of a key. It decides which of its errors reach those that wait for the key, and which of theirs reach
    it: see `Flight.note_failure`.

    ``manner()``: a digest of the limits and credentials with which it asks remotes; takes milliseconds at first. ``runs_function``: a
    function of the program makes the value, which may ask remotes or not; else it is what a remote serves."""

    manner: Callable[[], str]
    runs_function: bool = False


class Codec(Protocol[Item]):
    """A program's own codec, for `Cache.samples`, `Cache.tasks` and `Cache.prefetcher`.

    Its ``name``, if it is a str, is stored with the values, else the name of its class; a different name means a different codec. The codec
    is called from any thread, and pickled together with the object that uses it."""

    def encode(self, value: Item, /) -> Buffer:
        """Return the bytes to store for a value."""

    def decode(self, data: memoryview, /) -> Item:
        """Return the value of such bytes. ``data`` is read-only, and stays valid as long as anything refers to it."""


class Span(NamedTuple):
    """``length`` bytes from ``start``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after the span."""
        return self.start + self.length


class ObjectInfo(NamedTuple):
    """A remote's description of an object.

    ``size``: bytes; None if the remote does not report it. ``validator``: the ETag as sent (quotes and ``W/`` included), else
    ``mtime-size``, else None. ``strong``: whether equal validators mean equal bytes, so that a partial can be resumed. ``modified``:
    seconds since 1970, or None. ``sha256``: the checksum of the bytes, in hex, if the remote reports it; checked once they have arrived.
    ``note``: a short text that the entry is to carry. ``varies``: another caller may get other bytes, see `Entry.varies`."""

    url: str
    size: int | None
    validator: str | None = None
    strong: bool = False
    modified: float | None = None
    sha256: str | None = None
    note: str = ""
    varies: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether this is the empty object that stands for a directory."""
        return self.url.endswith("/") and not self.size


class Partial(NamedTuple):
    """The part that an earlier fetch left. A fetch may resume it if the object still has this validator and size."""

    size: int
    validator: str
    missing: tuple[Span, ...]


class Transfer:
    """What a remote did during one call, for the counters and for the user."""

    def __init__(
        self, requests: int = 0, received: int = 0, retries: int = 0, resumed: int = 0, info: ObjectInfo | None = None
    ) -> None:  # fmt: skip
        self.requests, self.received, self.retries, self.resumed, self.info = requests, received, retries, resumed, info


class SourceInfo(NamedTuple):
    """Where an item comes from. ``uri``: the dataset's; ``key``: the item's key in it; ``shard``: the shard that holds it, if any;
    ``files``: the names of its files."""

    uri: str
    key: str
    shard: str | None = None
    files: tuple[str, ...] = ()


class Source(Protocol):
    """Items as bytes under string keys. Any object with these two members is a source. It must be callable from several threads, and
    picklable if spawned workers use it.

    Optional members:

    - ``version``: str or None. Different items under the same keys have different versions. Items of a source with neither this nor
      ``version_of`` are stored no longer than the processes that use them.
    - ``version_of(key)``: str or None. The version of one item, if that is cheap to find out.
    - ``identity``: str. Used in place of ``uri`` to tell its items from those of other sources. It is stored as a hash, and not shown.
    - ``size(key)``: int or None. The bytes of an item; one that is larger than its space is not read ahead.
    - ``info(key)``: `SourceInfo`.
    - ``lease(key)``: a `Lease` on the item's bytes if the cache has exactly these, from `Cache.read` or a `pull`; else None. The bytes
      then get a second name, and are not read.
    - ``fetch(key)``: as ``source[key]``, called for items for which ``lease`` returned None.
    - ``bind(fetcher)``: called once with the cache's own `Fetcher`, before the first item is requested."""

    @property
    def uri(self) -> str:
        """Identifies the dataset in keys and provenance. Contains no secrets."""
        ...

    def __getitem__(self, key: str, /) -> bytes:
        """Return the item's bytes. An error reaches every caller that waits for the item."""
        ...


class Sink(Protocol):
    """Receives the bytes of one object from a remote. Made by the engine or by `NullStore`; used by one fetch."""

    partial: Partial | None
    """Set if an earlier fetch left a part that can be resumed."""

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """Reserve room for the object that the remote found, and return the spans to fetch.

        Called once per successful fetch, and again (with the new info) if the object changed during it: everything written before is then
        void. If ``info.size`` is None, returns one span of length -1; the room grows as bytes arrive. Raises `NoSpace` if the object cannot
        be stored; the remote passes that on."""

    def write(self, offset: int, data: Buffer) -> None:
        """Store ``data`` at ``offset``. Called from several threads at once for different spans; in order within a span."""


class CloningSink(Sink, Protocol):
    """A sink that may share the blocks of a local file instead of receiving its bytes."""

    def clone(self, fd: int) -> bool:
        """Take all bytes of the open file ``fd``, which has the size that `begin` was given. Returns False where that is impossible: the
        caller writes them."""


def can_clone(sink: Sink) -> TypeGuard[CloningSink]:
    """Whether a sink is a `CloningSink`."""
    return hasattr(sink, "clone")


class BufferSink:
    """A sink in memory, for bytes that the cache cannot store, or need not. ``data``: the bytes so far.

    Memory grows as bytes come, whatever size the remote claims. ``most``: returns how many bytes an object may have that comes compressed,
    None for no limit; the code that decompresses it asks. Callable from any thread."""

    def __init__(self, most: Callable[[], int] | None = None) -> None:
        self.most = most
        self._growing = threading.Lock()  # two concurrent ranges may both lie beyond the end
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


class Started(Protocol):
    """A `Remote.fetch` whose first request was sent. For one thread at a time; ends by `into`, called once, or `close`."""

    def is_here(self, most: int) -> bool:
        """Whether the whole object has come, of at most ``most`` bytes and as it is stored: then `into` waits for nothing."""

    def into(self, sink: Sink) -> Transfer:
        """Complete the fetch. See `Remote.fetch`."""

    def close(self) -> None:
        """Give the request up, if it was not used. Idempotent."""


class Remote(Protocol):
    """A kind of storage to fetch objects from. Callable from several threads and after a fork."""

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """Return the remote's description of the object; None if its validator is still ``known``. Raises `RemoteError`."""

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """Fetch the whole object (or what `Sink.partial` lacks) into ``sink``. Retries, resumes, checks lengths. Raises `RemoteError`, or
        what ``sink`` raises. The caller holds no lock except this key's.

        ``listed``: how a recent listing described the object. A remote that must first ask for the description may use this one instead,
        and then compares it with the object once all bytes have arrived."""

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """Return exactly the bytes of ``span`` (fewer only if the object ends). Raises `RemoteChanged` if ``validator`` no longer holds.

        ``info``: an earlier description of the object. Its validator counts as ``validator``; its other fields are compared if a response
        has no validator. ``exact``: raise `Unsupported` rather than receive bytes outside ``span``."""

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose URL starts with ``url``, in order of name. An empty directory may be among them, as an object without
        bytes whose URL ends with a slash, as many tools create it on S3."""

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """Write ``source`` as a whole object, replacing any that is there. A file is never held in memory as a whole.

        ``if_none_match``: with ``"*"``, write only if there is no object yet. ``if_match``: only replace the object with this validator. If
        a condition fails, raises `Conflict`, or `Unsupported` if the remote has no conditional writes. A write whose response was lost is
        sent again; under a condition it then fails although the object was written. ``on_sent``: called, from any thread, with the number
        of bytes sent so far (lower than before if some are sent again); an error that it raises ends the write. ``resume``: if a large
        object is sent in parts (S3), received parts stay there when the write fails, and the next write with ``resume`` continues from
        them. Raises `RemoteError`, `SourceChanged`, or what reading the source raises."""

    def delete(self, url: str) -> None:
        """Remove the object, if there is one. Raises `RemoteError`."""


class StartingRemote(Remote, Protocol):
    """A remote that can have many fetches in progress without a thread for each."""

    def start(self, url: str, on_ready: Callable[[], None]) -> Started | None:
        """Send the first request of a `fetch`, without waiting for anything. None if it has to wait, or to fail.

        ``on_ready`` is called once, from any thread, when the response has ended, or as much of it has come as is held in
        memory. It must not wait."""


def can_start(remote: Remote) -> TypeGuard[StartingRemote]:
    """Whether a remote is a `StartingRemote`."""
    return hasattr(remote, "start")


class CheckingRemote(Remote, Protocol):
    """A remote that compares versions and sends a changed object by one request."""

    def fetch_changed(self, url: str, sink: Sink, known: str | None) -> Transfer | None:
        """As `fetch`, unless the object still has the validator ``known``: then None, and nothing is passed to the sink. Has the time
        limits of a ``stat`` of a known version until the object is described to the sink."""


def can_check(remote: Remote) -> TypeGuard[CheckingRemote]:
    """Whether a remote is a `CheckingRemote`."""
    return hasattr(remote, "fetch_changed")


class NearRemote(Remote, Protocol):
    """A remote that may need no network."""

    def is_near(self, url: str) -> bool:
        """Whether this process reads the object without a connection: then many at once come no sooner than a few."""


def is_near(remote: Remote, url: str) -> bool:
    """See `NearRemote.is_near`."""
    return _may_be_near(remote) and remote.is_near(url)


def _may_be_near(remote: Remote) -> TypeGuard[NearRemote]:
    return hasattr(remote, "is_near")


class Noted(bytes):
    """The bytes of an item, with a short text that is stored in its row, so that it counts against no quota."""

    note: str = ""

    @classmethod
    def of(cls, data: Buffer, note: str) -> Self:
        value = cls(data)
        value.note = note
        return value


class Entry(NamedTuple):
    """One version of one key in one space. Times are in seconds since 1970.

    ``size``: bytes stored. ``charge``: bytes counted against the budget (whole blocks). ``kind``: ``blob``, ``value``, ``tree`` or
    ``pack``. ``life``: ``cached``, ``pinned`` or ``held``. ``checksum``: the xxh3-128 over the xxh3-128 of each 8 MiB."""

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
        """The name on the command line: the URL, or ``space:key``."""
        return self.key if self.space == URLS else f"{self.space}:{self.key}"

    @property
    def varies(self) -> bool:
        """Whether the remote may have other bytes for another caller (``Vary``): it is asked before each use, and nothing validates the
        entry for the next one."""
        return '"varies": true' in self.meta


def noted(meta: str, **types: type) -> dict[str, Any] | None:
    """Return an entry's ``meta`` as JSON; None where it is not JSON, or lacks a name of ``types`` with a value of exactly that type (an
    int must be a count): another program wrote it."""
    import json

    try:
        content = json.loads(meta)
    except (ValueError, RecursionError):
        return None
    if type(content) is not dict:
        return None
    values: list[Any] = [content.get(name) for name in types]
    sound = all(type(value) is kind for value, kind in zip(values, types.values(), strict=True))
    return content if sound and all(0 <= value < 1 << 48 for value in values if type(value) is int) else None


class Victim(NamedTuple):
    """An entry that a `Plan` would remove."""

    name: str
    size: int
    charge: int
    used: float
    id: int

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Return the victim that stands for ``entry``."""
        return cls(entry.name, entry.size, entry.charge, entry.used, entry.id)


class Report(NamedTuple):
    """The result of a removal. ``freed``: bytes freed. ``removed``: entries removed. ``stray_files``: removed files that no entry named.
    ``spared``: entries that were in use, pinned, or already gone."""

    removed: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    freed: int = 0
    stray_files: int = 0


class Strays(NamedTuple):
    """Files in a root that no budget counts; bytes are whole blocks. ``files``, ``bytes``: Forebay's own, which no entry names;
    ``foreign``, ``foreign_bytes``: other programs', which are left alone."""

    files: int = 0
    bytes: int = 0
    foreign: int = 0
    foreign_bytes: int = 0


class Problem(NamedTuple):
    """One result of a check. ``kind``: a short word; ``subject``: the file, entry or total; ``found``: a description."""

    kind: str
    subject: str
    found: str
    key: str = ""
    id: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.found}"
