"""The metadata of a directory: a small JSON object beside its files, as Ray writes it, so that either reads the other's."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._logs import logger
from forebay._model import BufferSink
from forebay.directories.copying import locked
from forebay.directories.listings import Listings
from forebay.directories.location import RemoteDirectory
from forebay.origin import Origin
from forebay.origin.request import FetchOptions

log = logger("forebay.metadata")

METADATA = ".metadata.json"
ATTEMPTS = 50  # of an update, where others update at the same time
PAUSE = 0.05  # seconds, at most, doubled up to a second


def read(origin: Origin, location: RemoteDirectory) -> dict[str, Any]:
    """What is stored now, asked of the remote; ``{}`` where nothing is. Raises `RemoteError`; `Offline` where the cache may ask nobody."""
    if origin.offline and location.local is None:
        return _parsed(location, bytes(origin.read(location.target(METADATA), FetchOptions(offline=True))))
    return _stored(origin, location)[0]


def write(origin: Origin, location: RemoteDirectory, metadata: Mapping[str, Any]) -> None:
    """Store this in place of what is there. Raises `NotJson` for what JSON cannot hold, before anything is written; `RemoteError`."""
    data = _encoded(metadata)
    with _exclusive(origin, location):
        location.remote.write(location.object(METADATA), data)
    forget(origin, location)


def update(origin: Origin, location: RemoteDirectory, metadata: Mapping[str, Any]) -> None:
    """Set these keys, and leave the others as they are. Raises as `write` does.

    Two updates at once are both done: from several nodes where the store knows conditional writes, as S3 does (network file systems:
    almost, see `LocalRemote.write`); elsewhere on one node, for those that share a cache."""
    _encoded(metadata)
    with _exclusive(origin, location):
        for attempt in range(1, ATTEMPTS + 1):
            stored, validator = _stored(origin, location)
            try:
                _put(location, _encoded({**stored, **metadata}), validator)
                break
            except errors.Conflict:  # another node was quicker: its keys are kept
                if attempt == ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, min(1.0, PAUSE * 2**attempt)))
    forget(origin, location)


def forget(origin: Origin, location: RemoteDirectory) -> None:
    """Let the cache's next reader of the directory ask what is in it now."""
    try:
        Listings(origin).postpone(location, 0)
    except errors.CacheFault as error:  # a root that may only be read is no reason not to write to a remote
        log.debug("%s: its listing in the cache stays: %s", location.key, error)


def _stored(origin: Origin, location: RemoteDirectory) -> tuple[dict[str, Any], str | None]:
    """What is there, and its validator: "" where there is none, None where nothing is."""
    sink = BufferSink(origin.most)
    try:
        origin.count(location.remote.fetch(location.object(METADATA), sink))
    except errors.NotFound:
        return {}, None
    return _parsed(location, bytes(sink.data)), (sink.info.validator if sink.info else None) or ""


def _put(location: RemoteDirectory, data: bytes, validator: str | None) -> None:
    """Write where nothing is, or over this version only, if the store can tell."""
    url = location.object(METADATA)
    if validator == "":
        location.remote.write(url, data)
        return
    try:
        location.remote.write(url, data, if_none_match="*" if validator is None else None, if_match=validator)
    except errors.Unsupported:
        location.remote.write(url, data)


@contextlib.contextmanager
def _exclusive(origin: Origin, location: RemoteDirectory) -> Iterator[None]:
    """Of the threads and processes of this host: by the directory itself, where it is one of this host's, else by the cache."""
    with contextlib.ExitStack() as stack:
        for lock in _locks(origin, location):
            try:
                stack.enter_context(lock())
                break
            except OSError as error:  # NFS locks no directories; some roots may only be read
                log.debug("%s cannot be locked: %s", location.key, error)
        else:
            origin.warn("metadata", "the metadata of %s is written under no lock", location.key)
        yield


def _locks(origin: Origin, location: RemoteDirectory) -> Iterator[Callable[[], contextlib.AbstractContextManager[object]]]:
    local, store = location.local, origin.store
    if local is not None:
        yield lambda: locked(Path(local, METADATA))
    if store.keeps:
        yield lambda: store.locks.named(f"metadata {location.key}")


def _encoded(metadata: object) -> bytes:
    if not isinstance(metadata, dict):
        message = f"metadata is a {type(metadata).__name__}: a dict is wanted"
        raise errors.NotJson(message, name="metadata", value=type(metadata).__name__)
    try:
        return json.dumps(metadata).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.NotJson(f"metadata cannot be written as JSON: {error}", name="metadata", value=str(error)) from error


def _parsed(location: RemoteDirectory, data: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(data)
        if not isinstance(metadata, dict):
            raise ValueError(f"a {type(metadata).__name__} where an object is wanted")
    except (ValueError, RecursionError) as error:
        message = f"{location.key}{METADATA} is damaged ({error}): set_metadata() writes it anew"
        raise errors.RemoteProtocolError(message, url=location.key) from error
    return metadata
