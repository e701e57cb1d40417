"""What all prefetchers have in common, and the one that has no cache behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from forebay import errors
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import Item_co
from forebay.prefetch.lazies import Later, Lazy, Spilled, add_source
from forebay.reports import OnProgress, WarmReport
from forebay.sources import DecodedSource, Source, SourceInfo, source_of

log = logger("forebay.prefetch")
T = TypeVar("T")
AHEAD = 64


class Pool(Generic[Item_co]):
    """What a prefetcher and `PassThrough` have in common: the calls that are made of others."""

    source: Any
    identity: str

    def get_lazy(self, key: str) -> Lazy[Item_co]:
        raise NotImplementedError

    def get(self, key: str, sample: Any = None) -> Item_co:
        """An item, read and decoded now; the cache is neither looked into nor written to. Raises what the source raises."""
        value: Item_co = self._read(key)
        if sample is not None:
            add_source(sample, self._info(key))
        return value

    def _read(self, key: str) -> Any:
        raise NotImplementedError

    def get_many(self, keys: Iterable[str]) -> list[Item_co]:
        """The items of these keys, in order: loaded several at a time."""
        return list(self.stream(keys))

    def stream(self, keys: Iterable[str], ahead: int = AHEAD) -> Iterator[Item_co]:
        """The items of these keys in order, with a window of ``ahead`` of them loading while the caller works on one.

        ``keys`` may be endless: it is read as far as the window goes. Raises at an item what its source raised; an iterator that is
        dropped lets go of its window."""
        if ahead < 0:
            raise errors.ConfigError(
                f"ahead={ahead} makes no sense: how many items are loaded ahead is not negative", name="ahead", value=ahead
            )
        return self._stream(keys, ahead)

    def _stream(self, keys: Iterable[str], ahead: int) -> Iterator[Item_co]:
        window: deque[Lazy[Item_co]] = deque()
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


class PassThrough(Pool[Item_co]):
    """The same interface with no cache behind it: nothing is loaded ahead, an item is read when it is wanted. The baseline of benchmarks.

    ``source``, ``decode``: as for `Cache.prefetcher`."""

    def __init__(
        self, source: Any, *, decode: Any = None, again: Callable[[Mapping[str, int]], Pool[Any] | None] | None = None
    ) -> None:  # fmt: skip
        """``again``: opens the prefetcher that this one stands for, with these limits, once the cache can be used."""
        self._again, self._turn = again, waits.Turn()
        self._opened: Any = None
        self._limits: dict[str, int] = {}
        self.source = wrapped(source_of(source), decode)
        self.identity, self.closed = f"past:{id(self.source)}", False
        self.name = ""

    @property
    def used(self) -> int:
        """Bytes that items have in the cache."""
        return 0 if self._opened is None else int(self._opened.used)

    @property
    def count(self) -> int:
        """How many items are in the cache."""
        return 0 if self._opened is None else int(self._opened.count)

    def get_lazy(self, key: str) -> Lazy[Item_co]:
        """A lazy that reads at its first `get`. Raises `Closed`."""
        opened = self._look()
        found: Lazy[Item_co] = Later(self, key) if opened is None else opened.get_lazy(key)
        return found

    def put(self, obj: T, name: str = "") -> Lazy[T]:
        """A lazy that has the object."""
        opened = self._look()
        found: Lazy[T] = Spilled(self, name, None, obj) if opened is None else opened.put(obj, name)
        return found

    def warm(self, keys: Iterable[str], on_progress: OnProgress | None = None) -> WarmReport:
        """Nothing can be kept: all of them fail with `NoSpace`."""
        opened = self._look()
        if opened is not None:
            report: WarmReport = opened.warm(keys, on_progress)
            return report
        no = "it cannot be kept: the cache cannot be used now" if self._again else "it cannot be kept: the cache is switched off"
        return WarmReport((), tuple((key, errors.NoSpace(f"{key}: {no}", key=key, need=0, free=0, budget=0)) for key in keys))

    def set_limits(self, *, budget: int | None = None, max_count: int | None = None) -> None:
        """See `Prefetcher.set_limits`: for when the cache can be used."""
        self._limits |= {name: value for name, value in (("budget", budget), ("max_count", max_count)) if value is not None}
        opened = self._look()
        if opened is not None:
            opened.set_limits(budget=budget, max_count=max_count)

    def _look(self) -> Any:
        """The prefetcher itself, if it can be had by now. Raises `Closed`."""
        if self.closed:
            raise errors.Closed.of("prefetcher")
        if self._opened is None and self._again is not None and self._turn.take():
            self._open(self._again)
        return self._opened

    def _open(self, again: Callable[[Mapping[str, int]], Pool[Any] | None]) -> None:
        """By one thread at a time. Faults are for `again` to tell: an item of the loop does not fail for them."""
        may_try = True
        given = dict(self._limits)
        try:
            with waits.patience(0):
                found: Any = again(given)
            if found is not None:
                self._opened, may_try = found, False
                if self.closed:  # meanwhile, by another thread
                    found.close()
                elif self._limits != given:
                    found.set_limits(**self._limits)
        except errors.ConfigError as error:
            may_try = False
            log.warning("the prefetcher goes on past the cache: %s", str(error))
        except errors.CacheFault as error:
            log.warning("the limits of the prefetcher are not set: %s", str(error))
        finally:
            if may_try:
                self._turn.give_back()

    def _read(self, key: str) -> Any:
        return self.source[key]

    def close(self) -> None:
        """`get_lazy` is then `Closed`."""
        self.closed = True
        if self._opened is not None:
            self._opened.close()


def wrapped(source: Source, decode: Any) -> Source:
    """With ``decode`` around it, if there is one."""
    return DecodedSource(source, decode) if decode is not None else source
