"""What all prefetchers have in common, and the one that has no cache behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from forebay import errors
from forebay.lazies import Later, Lazy, Spilled, add_source
from forebay.reports import OnProgress, WarmReport
from forebay.sources import DecodedSource, Source, SourceInfo, source_of

AHEAD = 64


class Pool:
    """What a prefetcher and `PassThrough` have in common: the calls that are made of others."""

    source: Any
    identity: str

    def get_lazy(self, key: str) -> Lazy:
        raise NotImplementedError

    def get(self, key: str, sample: Any = None) -> Any:
        """An item, read and decoded now; the cache is neither looked into nor written to. Raises what the source raises."""
        value = self._read(key)
        if sample is not None:
            add_source(sample, self._info(key))
        return value

    def _read(self, key: str) -> Any:
        raise NotImplementedError

    def get_many(self, keys: Iterable[str]) -> list[Any]:
        """The items of these keys, in order: loaded several at a time."""
        return list(self.stream(keys))

    def stream(self, keys: Iterable[str], ahead: int = AHEAD) -> Iterator[Any]:
        """The items of these keys in order, with a window of ``ahead`` of them loading while the caller works on one.

        ``keys`` may be endless: it is read as far as the window goes. Raises at an item what its source raised; an iterator that is
        dropped lets go of its window."""
        if ahead < 0:
            raise errors.ConfigError(
                f"ahead={ahead} makes no sense: how many items are loaded ahead is not negative", name="ahead", value=ahead
            )
        return self._stream(keys, ahead)

    def _stream(self, keys: Iterable[str], ahead: int) -> Iterator[Any]:
        window: deque[Lazy] = deque()
        for key in keys:
            window.append(self.get_lazy(key))
            if len(window) > ahead:
                yield window.popleft().get()
        while window:
            yield window.popleft().get()

    def _info(self, key: str) -> SourceInfo:
        tell = getattr(self.source, "info", None)
        return tell(key) if tell is not None else SourceInfo(self.source.uri, key, None, (key,))

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class PassThrough(Pool):
    """The same interface with no cache behind it: nothing is loaded ahead, an item is read when it is wanted. The baseline of benchmarks.

    ``source``, ``decode``: as for `Cache.prefetcher`."""

    def __init__(self, source: Any, *, decode: Any = None) -> None:
        self.source = wrapped(source_of(source), decode)
        self.identity, self.closed = f"past:{id(self.source)}", False
        self.name, self.used, self.count = "", 0, 0

    def get_lazy(self, key: str) -> Lazy:
        """A lazy that reads at its first `get`. Raises `Closed`."""
        if self.closed:
            raise errors.Closed.of("prefetcher")
        return Later(self, key)

    def put(self, obj: Any, name: str = "") -> Lazy:
        """A lazy that has the object."""
        if self.closed:
            raise errors.Closed.of("prefetcher")
        return Spilled(self, name, None, obj)

    def warm(self, keys: Iterable[str], on_progress: OnProgress | None = None) -> WarmReport:
        """Nothing can be kept: all of them fail with `NoSpace`."""
        no = "it cannot be kept: the cache is switched off"
        return WarmReport((), tuple((key, errors.NoSpace(f"{key}: {no}", key=key, need=0, free=0, budget=0)) for key in keys))

    def _read(self, key: str) -> Any:
        return self.source[key]

    def close(self) -> None:
        """`get_lazy` is then `Closed`."""
        self.closed = True


def wrapped(source: Source, decode: Any) -> Source:
    """With ``decode`` around it, if there is one."""
    return DecodedSource(source, decode) if decode is not None else source
