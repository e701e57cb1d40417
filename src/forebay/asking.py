"""One object of a remote, and how one call wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay import _model, errors
from forebay._engine.fill import OnWait
from forebay._model import ObjectInfo, Partial, Remote, Span


@dataclass(frozen=True, slots=True)
class Target:
    """A URL: where it is fetched from, and the key under which it is kept. Secrets stand in ``url`` only."""

    url: str
    key: str
    suffix: str
    remote: Remote
    in_place: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """How one call wants an object. ``since``: serve what was validated at or after this (nanoseconds of the store's clock; 1: ever;
    -1: even if it was invalidated). ``refresh``: and only what was validated since the call began, whatever the clock says.
    ``timeout``: seconds to wait for another process. ``bypass``: neither look into the cache nor write to it. ``force``: keep a local
    file in the cache too."""

    since: int = 1
    offline: bool = False
    sha256: str | None = None
    etag: str | None = None
    timeout: float | None = None
    bypass: bool = False
    force: bool = False
    pin: bool = False
    on_wait: OnWait | None = None
    on_progress: Callable[[int, int | None], None] | None = None
    refresh: bool = False


class Expecting:
    """A sink that refuses another version than the caller expects, before a byte of it is kept."""

    def __init__(self, sink: _model.Sink, url: str, etag: str) -> None:
        self._sink, self._url, self._etag = sink, url, etag
        self.partial: Partial | None = sink.partial
        self.write = sink.write
        self.most = getattr(sink, "most", None)  # see `MemorySink`

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        if not is_same_version(info.validator, self._etag):
            raise errors.ChecksumMismatch.of(self._url, self._etag, info.validator or "no ETag")
        return self._sink.begin(info)


def is_same_version(found: str | None, wanted: str) -> bool:
    """Whether two validators name one version, with or without their quotes."""
    return (found or "").removeprefix("W/").strip('"') == wanted.removeprefix("W/").strip('"')
