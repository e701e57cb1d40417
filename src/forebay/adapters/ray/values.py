"""Values of the cluster's cache: as the head serves them, and as processes of other nodes use them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay import errors
from forebay._engine.index.memo import Remembered
from forebay._engine.null_store import NullStore
from forebay._engine.store import Store
from forebay._model import Buffer
from forebay.codecs import Codec
from forebay.fetch import Fetcher
from forebay.tasks.values import Values

T = TypeVar("T")

AT_ONCE = 1 << 20  # bytes: smaller values come with the reply, without a second request


class Payload:
    """The bytes of a value that is sent to another process, in pieces, which Ray transfers out of band, without another copy.

    It creates each `PickleBuffer` when it is pickled: Python 3.11 may crash when it collects one in a reference cycle, as of an error."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self.pieces = [memoryview(piece) for piece in pieces]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Payload, ([pickle.PickleBuffer(piece) for piece in self.pieces],)


@dataclass(frozen=True, slots=True)
class HeadReply:
    """The value that the head has under a key. ``token``: unique among all values ever stored. ``meta``: codec and digest.
    ``payload``: None if the caller has it, cannot use it, or it is too large to come with the reply."""

    token: str
    meta: str
    size: int
    payload: Payload | None = None


class HeadValues(Values):
    """The values of the head, which it sends to other nodes without decoding them."""

    def give(self, key: str, meta: str, digested: bool, token: str) -> HeadReply | None:
        """The value under this key, or None. A use if ``meta`` is its meta, or without ``digested`` the beginning of it; its bytes
        come with the reply unless the caller has the value of ``token``."""
        store = self._store()
        stored = self._stored(key)
        if stored is None:
            self.fetcher.store.count("misses")
            return None
        own_token, own_meta = self._token(stored.id), stored.entry.meta
        if own_meta != meta and (digested or own_meta.rpartition(" ")[0] != meta):
            return HeadReply(own_token, own_meta, stored.size)
        store.touch(stored.entry)
        store.count_hit(stored.size)
        small = own_token != token and stored.size <= AT_ONCE
        return HeadReply(own_token, own_meta, stored.size, Payload([stored.view]) if small else None)

    def send(self, key: str, token: str) -> Payload | None:
        """The bytes of the value with this token; None if it is gone."""
        stored = self._stored(key)
        return Payload([stored.view]) if stored is not None and self._token(stored.id) == token else None

    def report_unreadable(self, key: str, token: str) -> bool:
        """Called if another node cannot read the value with this token. Returns whether it is damaged here; if so, it is quarantined."""
        stored = self._stored(key)
        return stored is not None and self._token(stored.id) == token and not self._store().is_intact(stored)

    def take(self, key: str, payload: Payload, meta: str, pin: bool) -> str:
        """Keep a value of another node, and return its token. Raises `CacheFault`."""
        return self._token(self._store().put_pieces(self.space, key, payload.pieces, life="pinned" if pin else "cached", meta=meta).id)

    def _token(self, id: int) -> str:
        """The token of an entry. It contains a hash of the id of the root: in one that is created anew, ids of entries begin again."""
        store = self._store()
        assert store.keeps  # one that keeps nothing has no entries
        return f"{hashlib.blake2b(store.root.id.to_bytes(8), digest_size=8).hexdigest()}-{id:x}"


class Unreachable(Exception):
    """The head does not answer."""


class RemoteValues(Values):
    """The values on another node than the head's: they come from the head, and a copy stays in this node's own cache.

    The meta of a copy begins with the token of the head's entry: the copy is used as long as the head has the same token.
    ``ask(method, *args, size=0)``: calls a method of the head's `HeadValues`. ``size``: bytes of the transfer. Raises `Unreachable`, or
    what the method raises."""

    def __init__(self, fetcher: Fetcher, space: str, codec: Codec, ask: Callable[..., Any]) -> None:
        super().__init__(fetcher, space, codec)
        self._ask = ask

    def hit(self, key: str, digest: str, *, copy: bool = False) -> tuple[Any] | None:
        return None  # the head is asked

    def _look(self, key: str, digest: str | None, label: str, copy: bool) -> tuple[Any] | None:
        store, own, meta = self._store(), self._stored(key), self._meta(digest)
        try:
            for token in [own.entry.meta.partition(" ")[0], ""] if own else [""]:
                answer: HeadReply | None = self._ask("give", key, meta, digest is not None, token)
                if answer is None or not self._is_ours(key, answer.meta, digest, label):
                    return None
                local = own if own and token == answer.token else None
                value = self._decoded(store, key, local, label, copy) if local else self._fetched(store, key, answer, label, copy)
                if value is not None:
                    if local:
                        store.touch(local.entry)
                    store.count_hit(answer.size)
                    self.counted["hits"] += 1
                    return value
            assert answer is not None
            self._ask("report_unreadable", key, answer.token)
        except Unreachable:
            pass  # which was logged
        except errors.CacheFault as error:  # of the head
            self.fetcher.fall_back(error, f"{self.space}:{key}")
        return None

    def _fetched(self, store: Store | NullStore, key: str, answer: HeadReply, label: str, copy: bool) -> tuple[Any] | None:
        payload = answer.payload or self._ask("send", key, answer.token, size=answer.size)
        if payload is None:
            return None  # the head has removed or replaced it since it answered
        local = self._copied(store, key, payload.pieces, f"{answer.token} {answer.meta}")
        if local is not None:
            return self._decoded(store, key, local, label, copy)
        try:
            return (self._decode_unstored(payload.pieces[0], copy),)
        except Exception as error:  # noqa: BLE001  # whatever the value's own code raises when it is decoded
            self._say(label or key, "class", f"{label or key}: {key} cannot be read here: {type(error).__name__}: {error}")
            return None

    def _copied(self, store: Store | NullStore, key: str, pieces: Sequence[Buffer], meta: str) -> Remembered | None:
        """This node's own copy of the value; None if there is no space for one: the bytes suffice."""
        try:
            store.put_pieces(self.space, key, pieces, meta=meta)
            local = store.view(self.space, key)
            return local if local is not None and local.entry.meta == meta else None  # otherwise another process has stored its own
        except errors.CacheFault as error:
            if store.keeps:  # else that is logged already
                self.fetcher.warn(f"copy {type(error).__name__}", "%s is not copied to this node: %s", f"{self.space}:{key}", error)
            return None

    def _keep(self, key: str, value: Any, *, digest: str, pin: bool, label: str) -> tuple[Sequence[Buffer], str] | None:
        """See `Values._keep`: the value is sent to the head, and a copy stays here."""
        pieces, meta = self._encoded(key, value, label), self._meta(digest)
        if pieces is None:
            return None
        payload = Payload(pieces)
        try:
            token = self._ask("take", key, payload, meta, pin, size=sum(piece.nbytes for piece in payload.pieces))
        except Unreachable:
            return None  # which is logged already
        except errors.CacheFault as error:
            self._not_kept(key, label, str(error), error)
            return None
        self._copied(self._store(), key, pieces, f"{token} {meta}")
        return pieces, f"{token} {meta}"

    async def single_async(
        self, key: str, digest: str | None, make: Callable[[], Awaitable[T]], *, pin: bool = False, label: str = "", copy: bool = False,
        **how: Any,
    ) -> T:  # fmt: skip
        """See `Values.single_async`. On a node without a cache there is no single-flight; the value is kept at the head."""
        if self._store().keeps:
            return await super().single_async(key, digest, make, pin=pin, label=label, copy=copy, **how)
        value = self.look(key, digest, label=label, copy=copy)
        if value is not None:
            return value[0]  # type: ignore[no-any-return]
        result = await make()
        value = self.kept(key, result, digest=digest or "", pin=pin, label=label, copy=copy)
        return result if value is None else value[0]

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
            return self._ask(method, *args)  # type: ignore[no-any-return]
        except Unreachable:
            return without
