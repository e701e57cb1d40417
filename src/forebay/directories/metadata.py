"""The metadata of a directory: a small JSON object beside its files, in the format of Ray, so that each can read the other's."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel import interrupts
from forebay._logs import logger
from forebay._model import BufferSink
from forebay.directories import listings
from forebay.directories.copying import locked
from forebay.directories.location import RemoteDirectory
from forebay.fetch.request import FetchOptions

log = logger("forebay.metadata")

METADATA = ".metadata.json"
ATTEMPTS = 50  # of an update, if there are concurrent updates
PAUSE = 0.05  # seconds: the maximum of the first pause, doubled up to a second


def read(location: RemoteDirectory) -> dict[str, Any]:
    """The metadata that the remote has now; ``{}`` if there is none. Raises `RemoteError`; `Offline` if the cache must not contact it."""
    if location.fetcher.offline and location.local is None:
        return _parsed(location, bytes(location.fetcher.read(location.target(METADATA), FetchOptions(offline=True))))
    return _stored(location)[0]


def write(location: RemoteDirectory, metadata: Mapping[str, Any]) -> None:
    """Replace the metadata. Raises `NotJson` for values that JSON cannot represent, before anything is written; `RemoteError`."""
    data = _encoded(metadata)
    with _exclusive(location):
        location.remote.write(location.object(METADATA), data)
    forget(location)


def update(location: RemoteDirectory, metadata: Mapping[str, Any]) -> None:
    """Set these keys, and leave the others unchanged. Raises as `write` does.

    Of concurrent updates none is lost: also from several nodes where the store has conditional writes, as S3 does (network file systems:
    almost, see `LocalRemote.write`); elsewhere on one node, between processes that share a cache."""
    _encoded(metadata)
    with _exclusive(location):
        for attempt in range(1, ATTEMPTS + 1):
            stored, validator = _stored(location)
            try:
                _put(location, _encoded({**stored, **metadata}), validator)
                break
            except errors.Conflict:  # another node was faster: keep its keys
                if attempt == ATTEMPTS:
                    raise
                interrupts.sleep(random.uniform(0, min(1.0, PAUSE * 2**attempt)))
    forget(location)


def forget(location: RemoteDirectory) -> None:
    """Make the next reader of the directory in this cache ask the remote for its listing."""
    try:
        listings.postpone(location, 0)
    except errors.CacheFault as error:  # a read-only root must not prevent writes to a remote
        log.debug("%s: its listing in the cache stays: %s", location.key, error)


def _stored(location: RemoteDirectory) -> tuple[dict[str, Any], str | None]:
    """The stored metadata, and its validator: "" if it has none, None if there is no metadata."""
    sink = BufferSink(location.fetcher.most)
    try:
        location.fetcher.count(location.remote.fetch(location.object(METADATA), sink))
    except errors.NotFound:
        return {}, None
    return _parsed(location, bytes(sink.data)), (sink.info.validator if sink.info else None) or ""


def _put(location: RemoteDirectory, data: bytes, validator: str | None) -> None:
    """Write only if nothing is there, or only over this version, if the store has conditional writes."""
    url = location.object(METADATA)
    if validator == "":
        location.remote.write(url, data)
        return
    try:
        location.remote.write(url, data, if_none_match="*" if validator is None else None, if_match=validator)
    except errors.Unsupported:
        location.remote.write(url, data)


@contextlib.contextmanager
def _exclusive(location: RemoteDirectory) -> Iterator[None]:
    """A lock between the threads and processes of this host: on the directory itself if it is local, else in the cache."""
    with contextlib.ExitStack() as stack:
        for lock in _locks(location):
            try:
                stack.enter_context(lock())
                break
            except OSError as error:  # NFS cannot lock directories; some roots are read-only
                log.debug("%s cannot be locked: %s", location.key, error)
        else:
            location.fetcher.warn("metadata", "the metadata of %s is written under no lock", location.key)
        yield


def _locks(location: RemoteDirectory) -> Iterator[Callable[[], contextlib.AbstractContextManager[object]]]:
    local, store = location.local, location.fetcher.store
    if local is not None:
        yield lambda: locked(Path(local, METADATA))
    if store.keeps:
        yield lambda: store.locks.named(f"metadata {location.key}")


def _encoded(metadata: object) -> bytes:
    if not isinstance(metadata, dict):
        message = f"metadata is a {type(metadata).__name__}: expected a dict"
        raise errors.NotJson(message, name="metadata", value=type(metadata).__name__)
    try:
        return json.dumps(metadata).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.NotJson(f"metadata cannot be written as JSON: {error}", name="metadata", value=str(error)) from error


def _parsed(location: RemoteDirectory, data: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(data)
        if not isinstance(metadata, dict):
            raise ValueError(f"it is no object, but {type(metadata).__name__}")
    except (ValueError, RecursionError) as error:
        message = f"{location.target(METADATA).key} is damaged ({error}): set_metadata() replaces it"
        raise errors.RemoteProtocolError(message, url=location.key) from error
    return metadata
