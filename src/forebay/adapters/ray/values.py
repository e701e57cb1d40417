"""Values of the cluster's cache, as the head serves them, as processes of other nodes see them, and with no head."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forebay import errors
from forebay._engine.index.memo import Remembered
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Store
from forebay._model import Buffer
from forebay.codecs import Codec
from forebay.origin import Origin
from forebay.tasks.values import Values

T = TypeVar("T")

AT_ONCE = 1 << 20  # what is smaller comes with the answer, without a second question


class Payload:
    """An encoded value on its way to another process: Ray puts its bytes beside the pickle, and nobody copies them once more."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self.pieces = [memoryview(piece).cast("B") if memoryview(piece).nbytes else memoryview(b"") for piece in pieces]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    def joined(self) -> memoryview:
        """All of it, as one."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol < 5:
            return Payload, ([bytes(piece) for piece in self.pieces],)
        return Payload, ([pickle.PickleBuffer(piece) for piece in self.pieces],)


@dataclass(frozen=True, slots=True)
class HeadReply:
    """What the head has under a key. ``token``: another one for each value that was ever stored. ``meta``: codec and digest.
    ``payload``: None where it was not wanted, not asked for, or too large to come at once."""

    token: str
    meta: str
    size: int
    payload: Payload | None = None


class HeadValues(Values):
    """The head's own: answers for other nodes, without decoding anything."""

    def give(self, key: str, meta: str, digested: bool, token: str) -> HeadReply | None:
        """What is under this key; None: nothing. It is a use where ``meta`` is what is there, or begins it if not ``digested``; its bytes
        come with it unless the caller has them: ``token``."""
        store = self._store()
        found = self._stored(key)
        if found is None:
            self.origin.store.count("misses")
            return None
        mine, there = self._token(found.id), found.entry.meta
        if there != meta and (digested or there.rpartition(" ")[0] != meta):
            return HeadReply(mine, there, found.size)
        store.touch(found.entry)
        store.count_hit(found.size)
        small = mine != token and found.size <= AT_ONCE
        return HeadReply(mine, there, found.size, Payload([found.view]) if small else None)

    def send(self, key: str, token: str) -> Payload | None:
        """The bytes of this very value; None if it is gone."""
        found = self._stored(key)
        return Payload([found.view]) if found is not None and self._token(found.id) == token else None

    def doubt(self, key: str, token: str) -> bool:
        """Another node cannot read this very value: whether it is damaged here; then it is set aside."""
        found = self._stored(key)
        return found is not None and self._token(found.id) == token and not self._store().is_intact(found)

    def take(self, key: str, payload: Payload, meta: str, pin: bool) -> str:
        """Keep what another node made; gives its token. Raises `CacheFault`."""
        store = self._store()
        return self._token(store.put_pieces(self.space, key, payload.pieces, life="pinned" if pin else "cached", meta=meta).id)

    def _token(self, id: int) -> str:
        """Of an entry. In a root that somebody deleted, and that was made anew, ids begin again."""
        store = self._store()
        return f"{store.root.id:x}-{id:x}" if store.keeps else f"{id:x}"


class Asks(Protocol):
    """Who speaks with the head."""

    def ask(self, method: str, *args: Any, size: int = 0) -> Any:
        """What a method of the head gives. ``size``: bytes that go with it. Raises `Unreachable`, or what the method raises."""


class Unreachable(Exception):
    """The head gives no answer."""


class RemoteValues(Values):
    """Of another node than the head's: values come from the head, and a copy stays in this node's own cache.

    A copy carries in front of what the head's entry carries the token of that: it is used while the head says the same one."""

    def __init__(self, origin: Origin, space: str, codec: Codec, head: Asks) -> None:
        super().__init__(origin, space, codec)
        self._head = head

    def _look(self, key: str, digest: str | None, who: str, copy: bool) -> tuple[Any] | None:
        try:
            return self._ask(key, digest, who, copy)
        except Unreachable:
            return None
        except errors.CacheFault as error:  # the head's
            self.origin.fall_back(error, f"{self.space}:{key}")
            return None

    def _ask(self, key: str, digest: str | None, who: str, copy: bool) -> tuple[Any] | None:
        store, mine, meta = self._store(), self._stored(key), self._meta(digest)
        answer: HeadReply | None
        for token in [mine.entry.meta.partition(" ")[0], ""] if mine else [""]:
            answer = self._head.ask("give", key, meta, digest is not None, token)
            if answer is None or not self._is_ours(key, answer.meta, digest, who):
                return None
            found = mine if mine and token == answer.token else None
            value = self._decoded(store, key, found, who, copy) if found else self._fetched(store, key, answer, who, copy)
            if value is not None:
                if found:
                    store.touch(found.entry)
                store.count_hit(answer.size)
                self.counted["hits"] += 1
                return value
        assert answer is not None
        self._head.ask("doubt", key, answer.token)
        return None

    def _fetched(self, store: Store | PassThrough, key: str, answer: HeadReply, who: str, copy: bool) -> tuple[Any] | None:
        payload = answer.payload or self._head.ask("send", key, answer.token, size=answer.size)
        if payload is None:
            return None  # gone since
        found = self._copied(store, key, payload, f"{answer.token} {answer.meta}")
        return self._read(store, key, found, payload, who, copy)

    def _read(
        self, store: Store | PassThrough, key: str, found: Remembered | None, payload: Payload, who: str, copy: bool
    ) -> tuple[Any] | None:  # fmt: skip
        """From this node's copy, else from what is at hand."""
        if found is not None:
            return self._decoded(store, key, found, who, copy)
        data = payload.joined()
        try:
            if copy:
                data = memoryview(bytearray(data))
                return (self.codec.decode(data, lambda: data),)
            return (self.codec.decode(data.toreadonly(), lambda: memoryview(bytearray(data))),)
        except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is made anew
            self._say(who or key, "class", f"{who or key}: {key} cannot be read here: {type(error).__name__}: {error}")
            return None

    def _copied(self, store: Store | PassThrough, key: str, payload: Payload, meta: str) -> Remembered | None:
        """This node's own copy of this very value; None where there is no room for one: what came will do."""
        try:
            store.put_pieces(self.space, key, payload.pieces, meta=meta)
            found = store.view(self.space, key)
            return found if found is not None and found.entry.meta == meta else None  # else another process has put its own there
        except errors.CacheFault as error:
            if not store.keeps:
                return None  # that was told
            self.origin.warn(f"copy {type(error).__name__}", "%s is not copied to this node: %s", f"{self.space}:{key}", error)
            return None

    def keep(self, key: str, value: Any, *, digest: str = "", pin: bool = False, who: str = "") -> bool:
        """See `Values.keep`: it goes to the head, and a copy stays here."""
        return self._sent(key, value, digest, pin, who) is not None

    def kept(self, key: str, value: Any, *, digest: str = "", pin: bool = False, who: str = "", copy: bool = False) -> tuple[Any] | None:
        """See `Values.kept`."""
        sent = self._sent(key, value, digest, pin, who)
        return self._read(self._store(), key, *sent, who, copy) if sent is not None else None

    def _sent(self, key: str, value: Any, digest: str, pin: bool, who: str) -> tuple[Remembered | None, Payload] | None:
        """This node's copy of what the head keeps now, if there is one, and the bytes; None where it is not kept."""
        store, pieces = self._store(), self._encoded(key, value, who)
        if pieces is None:
            return None
        payload, meta = Payload(pieces), self._meta(digest)
        try:
            token = self._head.ask("take", key, payload, meta, pin, size=payload.size)
        except Unreachable:
            return None  # that was told
        except errors.CacheFault as error:
            self._not_kept(key, who, str(error), error)
            return None
        return self._copied(store, key, payload, f"{token} {meta}"), payload

    def single(
        self, key: str, digest: str | None, make: Callable[[], T], *, pin: bool = False, who: str = "", copy: bool = False, **how: Any
    ) -> T:  # fmt: skip
        """See `Values.single`. On a node without a cache nobody is waited for; what is made is kept at the head."""
        if self._store().keeps:
            return super().single(key, digest, make, pin=pin, who=who, copy=copy, **how)
        found = self.look(key, digest, who=who, copy=copy)
        if found is not None:
            return found[0]  # type: ignore[no-any-return]
        value = make()
        found = self.kept(key, value, digest=digest or "", pin=pin, who=who, copy=copy)
        return value if found is None else found[0]

    def has(self, key: str) -> bool:
        return self._asked(False, "has", key)

    def has_any(self, prefix: str) -> bool:
        return self._asked(False, "has_any", prefix)

    def evict(self, key: str) -> bool:
        own = self._store().entry(self.space, key)
        if own is not None:
            super().evict(key)  # its bytes
        return self._asked(False, "evict", key)

    def flush(self) -> int:
        super().flush()
        return self._asked(0, "flush")

    def keys(self) -> list[str]:
        return self._asked([], "keys")

    def size(self) -> tuple[int, int]:
        return self._asked((0, 0), "size")

    def budget(self) -> int | None:
        return self._asked(None, "budget")

    def _asked(self, without: T, method: str, *args: Any) -> T:
        try:
            return self._head.ask(method, *args)  # type: ignore[no-any-return]
        except Unreachable:
            return without


class NullValues:
    """With no head: nothing is found and nothing kept; functions run."""

    def __init__(self, counted: dict[str, int]) -> None:
        self.counted = counted

    def look(self, key: str, digest: str | None = None, *, who: str = "", copy: bool = False) -> tuple[Any] | None:
        self.counted["misses"] += 1
        return None

    def keep(self, key: str, value: Any, *, digest: str = "", pin: bool = False, who: str = "") -> bool:
        return False

    def kept(self, key: str, value: Any, **how: Any) -> None:
        return None

    def single(self, key: str, digest: str | None, make: Callable[[], T], **how: Any) -> T:
        return make()

    async def single_async(self, key: str, digest: str | None, make: Callable[[], Awaitable[T]], **how: Any) -> T:
        return await make()

    def has(self, key: str) -> bool:
        return False

    def has_any(self, prefix: str) -> bool:
        return False

    def evict(self, key: str) -> bool:
        return False

    def flush(self) -> int:
        return 0

    def keys(self) -> list[str]:
        return []

    def size(self) -> tuple[int, int]:
        return 0, 0

    def size_bytes(self) -> int:
        return 0

    def budget(self) -> int | None:
        return None
