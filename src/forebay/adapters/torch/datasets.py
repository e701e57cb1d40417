"""Map-style datasets: the objects of URLs, a sampler that prefetches them, and a dataset that is decoded once for all workers of a node."""

from __future__ import annotations

import itertools
import logging
import operator
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Sampler

from forebay import errors
from forebay._kernel.interrupts import guarded, unless_of_handler
from forebay._logs import logger
from forebay._model import to_bytes
from forebay.cache import Cache
from forebay.remote.urls import Url, as_text
from forebay.samples import Samples
from forebay.sources import Decode, by_extension

log = logger("forebay.adapters.torch")

ADVICE = "Tuples and dicts of arrays, tensors and plain values: codec='pytree'; any objects: codec='pickle'."


class UrlDataset(Dataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """The objects of URLs, through the cache: item ``i`` is ``decode(url, data)`` of ``urls[i]``.

    ``urls``: URLs or paths: a list, a NumPy array of text, any iterable; they are packed into one text, so millions of them cost little in
    a fork and in a pickle. ``decode``: receives the URL as given, and the object's bytes as a read-only memoryview; a dict from extensions
    to such functions works as in `forebay.sources.by_extension`; without it items are bytes. ``cache``: an open `Cache`, or the arguments
    to open one (``{"root": "/nvme/forebay"}``; default: the default root).

    PyTorch's loaders request whole batches: misses of a batch are fetched in parallel, an object named twice only once. Errors are those of
    `Cache.read_many` and ``decode``. Picklable if ``decode`` is; usable in both processes after a fork; callable from any thread if
    ``decode`` is. Raises `ConfigError`, and what opening the cache raises."""

    def __init__(
        self, urls: Iterable[Url], decode: Decode | Mapping[str, Decode] | None = None, *, cache: Cache | Mapping[str, Any] | None = None
    ) -> None:
        if isinstance(urls, str | os.PathLike):
            raise errors.ConfigError("UrlDataset takes several URLs: a list, even of one", name="urls", value=str(urls))
        self.urls = PackedUrls(urls)
        self.cache = opened(cache)
        self.decode = by_extension(decode) if isinstance(decode, Mapping) else decode

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, i: int) -> Any:
        """Item ``i``. Raises IndexError outside of 0..N-1, what `Cache.read` raises, and what ``decode`` raises."""
        url = self.urls[i]
        return self._decoded(url, self.cache.read(url))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch, in its order."""
        urls = [self.urls[i] for i in indices]
        return [self._decoded(url, data) for url, data in zip(urls, self.cache.read_many(urls), strict=True)]

    def _decoded(self, url: str, data: memoryview) -> Any:
        return _picklable(data if self.decode is None else self.decode(url, data))


class PackedUrls(Sequence[str]):
    """URLs as one text without their common prefix, and its ends: an object for each URL would be counted, and so copied, by every forked
    worker, and would take ten times as long to pickle."""

    def __init__(self, urls: Iterable[Url]) -> None:
        texts = [as_text(url) for url in urls]
        self._prefix = str(os.path.commonprefix(texts))  # noqa: RUF071 (of characters)
        rest = [text[len(self._prefix) :].encode("utf-8", "surrogatepass") for text in texts]
        self._text, self._ends = b"".join(rest), array("Q", itertools.accumulate(map(len, rest)))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: Any) -> Any:
        """A URL, or those of a slice. Raises IndexError outside of 0..N-1."""
        if isinstance(i, slice):
            return [self[at] for at in range(*i.indices(len(self)))]
        index = operator.index(i)
        if not 0 <= index < len(self._ends):
            raise IndexError(f"item {index} is outside 0..{len(self._ends) - 1}")
        start = self._ends[index - 1] if index else 0
        return self._prefix + self._text[start : self._ends[index]].decode("utf-8", "surrogatepass")


def opened(cache: Cache | Mapping[str, Any] | None) -> Cache:
    """The cache itself, or the one that these arguments open."""
    return cache if isinstance(cache, Cache) else Cache(**(cache or {}))


class CachedDataset(Dataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """``dataset`` behind an array of samples: ``dataset[i]`` runs once on the node, and its result is stored. If the dataset has
    ``__getitems__``, as `UrlDataset` has, one call of it requests what a batch misses.

    ``samples``: an open array of ``len(dataset)`` slots, as returned by ``cache.samples(name, len(dataset), codec="pytree")``.
    ``transform``: applied to the item at each access; its result is never stored: for random augmentations.

    Items are those of `Samples.get`, and the caller's own: tensors and arrays are writable. With the codec ``raw`` the transform gets a
    read-only view, and without a transform the items are bytes. Errors of ``dataset`` and ``transform`` reach the caller; faults of the
    cache do not: ``dataset[i]`` runs instead. Picklable, usable in both processes after a fork, callable from any thread if ``dataset`` is.
    Raises `ConfigError` if ``samples`` is no such array, or has another length; `Closed`."""

    def __init__(self, dataset: Any, samples: Samples, transform: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(samples, Samples):
            advice = "open one with cache.samples(name, len(dataset), codec='pytree')"
            raise errors.ConfigError(f"samples={samples!r} is not an array of samples: {advice}", name="samples", value=repr(samples))
        if samples.closed:
            raise errors.Closed.of("array of samples")
        length = _length(dataset)
        if length != len(samples):
            message = f"the dataset has {length:,} items, but the array of samples {len(samples):,} slots: open one of the same length"
            raise errors.ConfigError(message, name="samples", value=len(samples), wanted=length)
        self.dataset, self.transform = dataset, transform
        self.samples = samples.writable()  # PyTorch warns of other arrays
        self._level = logging.WARNING

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        """Item ``i``, transformed. Raises IndexError outside of 0..N-1, and what ``dataset`` and ``transform`` raise."""
        return self._transformed(self._item(i))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch, transformed: PyTorch's loaders request whole batches."""
        indices = [operator.index(i) for i in indices]
        together = self._made_together(indices)
        # What a batch names twice is two objects: the second one is read from the cache.
        items = [together.pop(i)[0] if i in together else self._item(i) for i in indices]
        self.samples.get_many(())  # writes the counters: a worker may be ended without notice
        return [self._transformed(item) for item in items]

    def _transformed(self, item: Any) -> Any:
        return _picklable(item) if self.transform is None else self.transform(item)

    def _made_together(self, indices: Sequence[int]) -> dict[int, tuple[Any]]:
        """The items of empty slots, by one call of the dataset; those that are not in it are then read one by one: each raises its own
        error."""
        decoded: dict[int, Any] = {}
        slots = [i for i in dict.fromkeys(indices) if 0 <= i < len(self.samples) and i not in self.samples]
        if len(slots) < 2 or not hasattr(self.dataset, "__getitems__"):
            return {}

        def decode(slots: list[int]) -> list[Any]:
            values = self.dataset.__getitems__(slots)
            decoded.update(zip(slots, values, strict=True))
            return list(values)

        try:
            return {i: (item,) for i, item in zip(slots, self.samples.get_or_put_many(slots, decode), strict=True)}
        except errors.Closed:
            raise
        except unless_of_handler(Exception) as error:
            if decoded and isinstance(error, errors.ConfigError):
                error.add_note(ADVICE)
                raise
            if decoded:
                self._warn(slots[0], error)
            else:
                log.debug("a batch is read item by item: %s", error, exc_info=True)
            return {i: (item,) for i, item in decoded.items()}

    def _item(self, i: int) -> Any:
        index, decoded, ran = operator.index(i), [], False
        if not 0 <= index < len(self.samples):
            raise IndexError(f"item {index} is outside 0..{len(self.samples) - 1}")

        def decode() -> Any:
            nonlocal ran
            ran = True
            decoded.append(self.dataset[index])
            return decoded[-1]

        try:
            return self.samples.get_or_put(index, decode)
        except errors.Closed:
            raise
        except unless_of_handler(Exception) as error:
            if decoded and isinstance(error, errors.ConfigError):
                error.add_note(ADVICE)
                raise
            if ran and not decoded:
                raise  # the dataset's own error
            # A fault of the cache; or decoding failed in another process, and fails in this one with its own error.
            item = decoded[-1] if decoded else self.dataset[index]
            self._warn(index, error)
            return item

    @guarded
    def _warn(self, index: int, error: Exception) -> None:
        level, self._level = self._level, logging.DEBUG  # logged once
        log.log(level, "the cache failed, and items are read without it; here item %d: %s", index, error, exc_info=True)


def _picklable(item: Any) -> Any:
    return to_bytes(item) if type(item) is memoryview else item  # a view cannot be pickled, and PyTorch's worker would hang


def _length(dataset: Any) -> int:
    try:
        if not isinstance(dataset, IterableDataset):
            return len(dataset)
    except unless_of_handler(TypeError):
        log.debug("a %s has no length", type(dataset).__name__)
    kind = type(dataset).__name__
    raise errors.ConfigError(f"{kind} is not a map-style dataset: it needs __len__ and __getitem__", name="dataset", value=kind)


class Lookahead(Sampler):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """A sampler, or batch sampler, that yields what ``sampler`` yields, and prefetches the objects of the next indices:
    ``DataLoader(dataset, sampler=Lookahead(RandomSampler(dataset), dataset))``.

    ``sampler``: yields indices of ``dataset``, or lists of them. ``dataset``: a `UrlDataset`. ``window``, ``workers``: as for
    `Cache.lookahead`. ``horizon``: the number of indices to draw in advance, so that the cache keeps the objects that are used soonest: for
    a sampler that repeats indices.

    The process that iterates over it fetches the objects; workers find them in the cache, or wait for those that are on their way. Each
    iteration has its own look-ahead, which ends with the iteration or the process. ``set_epoch`` is that of the sampler. Raises
    `ConfigError`."""

    def __init__(
        self, sampler: Iterable[Any], dataset: UrlDataset, *, window: int | str | None = None, horizon: int = 0, workers: int = 16
    ) -> None:  # fmt: skip
        if not isinstance(dataset, UrlDataset):
            advice = "its items must be objects of URLs: UrlDataset(urls, decode)"
            raise errors.ConfigError(f"a {type(dataset).__name__} cannot be prefetched: {advice}", name="dataset", value=repr(dataset))
        self.sampler, self.dataset, self._window = sampler, dataset, window
        self._horizon, self._workers = horizon, workers

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # raises TypeError for a sampler without a length

    def __iter__(self) -> Iterator[Any]:
        drawn: deque[Any] = deque()

        def urls() -> Iterator[str]:
            for chosen in self.sampler:
                drawn.append(chosen)
                for index in _indices(chosen):
                    yield self.dataset.urls[index]

        with self.dataset.cache.lookahead(urls(), window=self._window, horizon=self._horizon, workers=self._workers) as ahead:
            while drawn:
                chosen = drawn.popleft()
                yield chosen
                for _ in _indices(chosen):
                    ahead.skip()
            ahead.skip()  # raises what the sampler raised

    def set_epoch(self, epoch: int) -> None:
        """Have the sampler, such as a DistributedSampler, draw the order of this epoch."""
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # raises AttributeError for a sampler without epochs


def _indices(chosen: Any) -> Iterable[int]:
    return chosen if isinstance(chosen, (list, tuple)) else (chosen,)
