"""PyTorch: tensors over cached bytes, and a map-style dataset whose items are decoded once for all workers of the node."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from forebay import errors
from forebay._kernel import mappings
from forebay._logs import logger
from forebay.codecs.arrays import numpy
from forebay.samples import Samples

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.torch", "torch") from error

__all__ = ["CachedDataset", "tensor"]

log = logger("forebay.adapters.torch")


def tensor(buffer: Any, dtype: Any = None, *, count: int = -1, offset: int = 0) -> Any:
    """A writable tensor with the bytes of ``buffer``, such as `Cache.read` returns. Nothing else sees what is written to it.

    It uses a private mapping of the same file: a page is copied when it is first written to. Small values, which have no file of their
    own, records of an array of samples, entries evicted meanwhile and buffers from elsewhere are copied as a whole. The mapping lives as
    long as the tensor and everything that shares its storage.

    ``dtype`` (default: `torch.uint8`), ``count`` (elements; -1: all), ``offset`` (bytes): as for `torch.frombuffer`, whose own tensors
    over a read-only mapping kill the process when they are written to. A NumPy array, or an object that NumPy converts (an image), gives a
    tensor of its own type and shape, unless one of these is given. Raises ValueError for what `torch.frombuffer` refuses, and TypeError
    for an object that is no buffer."""
    if isinstance(buffer, memoryview) or not hasattr(buffer, "__array_interface__"):
        array, view = None, memoryview(buffer)
    else:
        array = numpy().asarray(buffer, order="C")
        view = memoryview(array)
    own = _private(view)
    if array is not None and dtype is None and count == -1 and not offset:
        kind = torch.from_numpy(array.reshape(-1)[:0].copy()).dtype
        return (torch.frombuffer(own, dtype=kind) if own.nbytes else torch.empty(0, dtype=kind)).reshape(array.shape)
    if not own.nbytes and not offset and count <= 0:
        return torch.empty(0, dtype=dtype or torch.uint8)
    return torch.frombuffer(own, dtype=dtype or torch.uint8, count=count, offset=offset)


def _private(view: memoryview) -> memoryview:
    """A writable, private view of the same bytes."""
    flat, owner = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes()), view.obj
    while not isinstance(owner, memoryview) and (base := getattr(owner, "base", None)) is not None:
        owner = base  # an array over an array over a view
    try:
        mapped = mappings.private(flat, owner.obj if isinstance(owner, memoryview) else owner)
    except OSError as error:  # the limit of mappings or files of a process is reached
        log.debug("a buffer is copied: %s", error)
        mapped = None
    return memoryview(bytearray(flat)) if mapped is None else mapped


class CachedDataset(Dataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """``dataset`` behind an array of samples: ``dataset[i]`` runs once on the node, and its result is kept.

    ``samples``: an open array of ``len(dataset)`` slots, as returned by ``cache.samples(name, len(dataset), codec="pytree")``.
    ``transform``: applied to the item at each access, and its result is never stored: for random augmentations.

    Items are those of `Samples.get`: tensors are writable, arrays are read-only unless the array was opened with ``copy=True``; with the
    codec ``raw`` the transform gets a view, and without a transform the items are bytes. Errors of ``dataset`` and ``transform`` reach
    the caller; faults of the cache do not, as ``dataset[i]`` runs instead. Picklable, usable in both processes after a fork, callable from
    any thread if ``dataset`` is. Raises `ConfigError` if ``samples`` is no such array, or has another length; `Closed`."""

    def __init__(self, dataset: Any, samples: Samples, transform: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(samples, Samples):
            advice = "open one with cache.samples(name, len(dataset), codec='pytree')"
            raise errors.ConfigError(f"samples={samples!r} is no array of samples: {advice}", name="samples", value=repr(samples))
        if samples.closed:
            raise errors.Closed.of("array of samples")
        length = _length(dataset)
        if length != len(samples):
            message = f"the dataset has {length:,} items, but the array of samples {len(samples):,} slots: open one of the same length"
            raise errors.ConfigError(message, name="samples", value=len(samples), wanted=length)
        self.dataset, self.samples, self.transform = dataset, samples, transform
        self._level = logging.WARNING

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        """Item ``i``, transformed. Raises IndexError outside of 0..N-1, and what ``dataset`` and ``transform`` raise."""
        return self._transformed(self._item(i))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch, transformed: PyTorch's loaders request whole batches."""
        items = self._cached(indices)
        if any(item is None for item in items):
            items = [self._item(i) if item is None else item for i, item in zip(indices, items, strict=True)]
            self.samples.get_many(())  # writes the counters: a worker may be ended without notice
        return [self._transformed(item) for item in items]

    def _transformed(self, item: Any) -> Any:
        if self.transform is not None:
            return self.transform(item)
        return item.tobytes() if type(item) is memoryview else item  # a view cannot be pickled, and PyTorch's worker would hang

    def _cached(self, indices: Sequence[int]) -> list[Any]:
        """The cached items, None instead of the others, which are then read one by one: each raises its own error."""
        try:
            filled = [i in self.samples for i in indices]  # get_many would count a miss, which is counted again when the item is decoded
            items = iter(self.samples.get_many(itertools.compress(indices, filled)))
            return [next(items) if is_filled else None for is_filled in filled]
        except Exception as error:
            log.debug("a batch is read item by item: %s", error, exc_info=True)
            return [None] * len(indices)

    def _item(self, i: int) -> Any:
        index, decoded, ran = operator.index(i), [], False
        if not 0 <= index < len(self.samples):
            raise IndexError(f"item {index} is outside of 0..{len(self.samples) - 1}")

        def decode() -> Any:
            nonlocal ran
            ran = True
            decoded.append(self.dataset[index])
            return decoded[-1]

        try:
            return self.samples.get_or_put(index, decode)
        except errors.Closed:
            raise
        except Exception as error:
            if decoded and isinstance(error, errors.ConfigError):
                error.add_note("Tuples and dicts of arrays, tensors and plain values: codec='pytree'; any objects: codec='pickle'.")
                raise
            if ran and not decoded:
                raise  # the dataset's own error
            # A fault of the cache; or decoding failed in another process, and fails in this one with its own error.
            item = decoded[-1] if decoded else self.dataset[index]
            level, self._level = self._level, logging.DEBUG  # logged once
            log.log(level, "the cache failed, and items are read without it; here item %d: %s", index, error, exc_info=True)
            return item


def _length(dataset: Any) -> int:
    try:
        if not isinstance(dataset, IterableDataset):
            return len(dataset)
    except TypeError:
        log.debug("a %s has no length", type(dataset).__name__)
    kind = type(dataset).__name__
    raise errors.ConfigError(f"{kind} is no map-style dataset: it needs __len__ and __getitem__", name="dataset", value=kind)
