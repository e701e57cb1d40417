"""Finds an array of samples by its name, or creates it."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass

from forebay import errors
from forebay._engine.locks.lease import Lease
from forebay._engine.packs.pack import NoPack, Pack
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Store
from forebay._model import Entry, noted
from forebay.origin import Origin

SPACE = "samples"


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties that an array must have to be opened again: number of slots, codec, and fingerprint of the source."""

    length: int
    codec: str
    fingerprint: str | None

    @classmethod
    def of(cls, entry: Entry) -> Shape | None:
        """The shape noted in an entry; None if the note is not one of an array."""
        known = noted(entry.meta, length=int, codec=str)
        return cls(known["length"], known["codec"], entry.validator) if known and known["length"] > 0 else None

    def meta(self) -> str:
        return json.dumps({"length": self.length, "codec": self.codec})


def find_or_make(origin: Origin, name: str | None, shape: Shape) -> Pack | NoPack | None:
    """The array of this name; created if there is none, or it has another fingerprint. Without a name, a new one."""
    store = origin.store
    if name is None:
        key = f"~{secrets.token_hex(8)}"
        return store.packs.make(SPACE, key, shape.length, life="held", fingerprint=shape.fingerprint, meta=shape.meta())
    pack = find(origin, name, shape)
    if pack is not None or not shape.length:
        return pack
    hold = store.locks.hold(SPACE, name)
    try:
        # P1 sees none / P2 sees none / P1 holds the key, creates it, releases / P2 holds the key: we are here.
        pack = find(origin, name, shape)
        return pack or store.packs.make(SPACE, name, shape.length, fingerprint=shape.fingerprint, meta=shape.meta())
    finally:
        hold.release()


def find(origin: Origin, name: str, shape: Shape) -> Pack | None:
    """The array of this name, here or in the root upstream; None if there is none, or it has another fingerprint.

    A length of 0 accepts any. Raises `ConfigError` where it has another length or codec."""
    for store in (origin.store, origin.upstream):
        lease = _leased(origin, store, name) if store is not None else None
        if store is None or lease is None:
            continue
        stored = Shape.of(lease.entry)
        if stored is None:
            store.set_aside(lease.entry, f"{lease.entry.name}: its notes on length and codec are invalid")
            lease.close()
            continue
        if shape.fingerprint is not None and shape.fingerprint != stored.fingerprint:
            lease.close()
            continue
        if (shape.length or stored.length, shape.codec) != (stored.length, stored.codec):
            lease.close()
            raise errors.ConfigError(
                f"the array {name!r} has {stored.length:,} slots of the codec {stored.codec!r}, but {shape.length:,} of {shape.codec!r} "
                "were requested: choose another name, or give another fingerprint, which starts a new array",
                name="length", value=shape.length, found=stored.length,
            )  # fmt: skip
        pack = store.packs.open(lease, stored.length)
        if pack is not None:
            if store is not origin.store:
                pack.only_read()
            return pack
    return None


def _leased(origin: Origin, store: Store | PassThrough, name: str) -> Lease | None:
    try:
        return store.packs.find(SPACE, name)
    except errors.CacheFault as error:
        if store is origin.store:
            raise
        origin.fall_back(error, f"the upstream's array {name!r}")
        return None


def checked_name(name: str) -> str:
    """The name, if an array can have it. Raises `ConfigError`."""
    if not isinstance(name, str) or not name or name.startswith("~") or not name.isprintable():
        message = f"an array cannot be called {name!r}: a name is a str, not empty, without '~' at its begin"
        raise errors.ConfigError(message, name="name", value=repr(name))
    return name


def digest_of(fingerprint: str | bytes | None) -> str | None:
    """A fingerprint in its stored form."""
    if fingerprint is None:
        return None
    return hashlib.sha256(fingerprint.encode() if isinstance(fingerprint, str) else fingerprint).hexdigest()
