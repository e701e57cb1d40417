"""PyTorch: tensors over what the cache gives, and a map-style dataset each item of which is decoded once for all workers of the node."""

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
    """A tensor with the bytes of ``buffer``, such as `Cache.read` gives, that may be written to: nobody else sees what is written.

    It lies over a private mapping of the same file: pages are copied as they are written to, and none before. Small values, which have no
    file of their own, records of an array of samples, what was evicted meanwhile and buffers of others are copied. The mapping lives as
    long as the tensor, and what shares its storage.

    ``dtype`` (default: `torch.uint8`), ``count`` (elements; -1: all), ``offset`` (bytes): as for `torch.frombuffer`, which itself gives
    tensors that kill the process when they are written to. A NumPy array, or what NumPy takes for one (an image), gives a tensor of its own
    type and shape, unless one of these is said. Raises ValueError for what `torch.frombuffer` refuses, TypeError for what is no buffer."""
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
    """The same bytes, writable and nobody else's."""
    flat, below = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes()), view.obj
    while not isinstance(below, memoryview) and (base := getattr(below, "base", None)) is not None:
        below = base  # an array over an array over a view
    try:
        mapped = mappings.private(flat, below.obj if isinstance(below, memoryview) else below)
    except OSError as error:  # as many mappings, or files, as a process may have
        log.debug("a buffer is copied: %s", error)
        mapped = None
    return memoryview(bytearray(flat)) if mapped is None else mapped


class CachedDataset(Dataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """``dataset`` behind an array of samples: ``dataset[i]`` runs once for the node, and what it gave is kept.

    ``samples``: an open array of ``len(dataset)`` slots, as ``cache.samples(name, len(dataset), codec="pytree")`` opens one.
    ``transform``: applied to what ``dataset[i]`` gave each time that it is asked for, and never stored: random augmentations.

    Items come as `Samples.get` gives them: tensors may be written to, arrays are read-only unless the array was opened with
    ``copy=True``; with the codec ``raw`` the transform gets a view, and without one the items are bytes. What ``dataset`` and
    ``transform`` raise reaches the caller; a fault of the cache never does, ``dataset[i]`` is then taken as if there were none.
    Picklable, usable in both processes after a fork, callable from any thread if ``dataset`` is.
    Raises `ConfigError` for anything but such an array, or one of another length; `Closed`."""

    def __init__(self, dataset: Any, samples: Samples, transform: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(samples, Samples):
            how = "open one with cache.samples(name, len(dataset), codec='pytree')"
            raise errors.ConfigError(f"samples={samples!r} is no array of samples: {how}", name="samples", value=repr(samples))
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
        return self._given(self._item(i))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items of a batch, transformed: PyTorch's loaders ask for whole batches."""
        found = self._found(indices)
        if any(item is None for item in found):
            found = [self._item(i) if item is None else item for i, item in zip(indices, found, strict=True)]
            self.samples.get_many(())  # what was counted meanwhile is told: a worker may be ended without a word
        return [self._given(item) for item in found]

    def _given(self, item: Any) -> Any:
        if self.transform is not None:
            return self.transform(item)
        return item.tobytes() if type(item) is memoryview else item  # a view cannot be pickled: PyTorch's worker would hang over it

    def _found(self, indices: Sequence[int]) -> list[Any]:
        """What is in the cache, None in place of the rest, which is looked at one by one: each then raises what is its own."""
        try:
            there = [i in self.samples for i in indices]  # else a miss would be counted here, and once more where it is made
            kept = iter(self.samples.get_many(itertools.compress(indices, there)))
            return [next(kept) if filled else None for filled in there]
        except Exception as error:
            log.debug("a batch is looked at item by item: %s", error, exc_info=True)
            return [None] * len(indices)

    def _item(self, i: int) -> Any:
        index, made, ran = operator.index(i), [], False
        if not 0 <= index < len(self.samples):
            raise IndexError(f"item {index} is outside of 0..{len(self.samples) - 1}")

        def decode() -> Any:
            nonlocal ran
            ran = True
            made.append(self.dataset[index])
            return made[-1]

        try:
            return self.samples.get_or_put(index, decode)
        except errors.Closed:
            raise
        except Exception as error:
            if made and isinstance(error, errors.ConfigError):
                error.add_note("Tuples and dicts of arrays, tensors and plain values: codec='pytree'; any objects: codec='pickle'.")
                raise
            if ran and not made:
                raise  # the dataset's own
            # The cache's fault; or it failed in another process that was waited for, and fails here with its own error.
            item = made[-1] if made else self.dataset[index]
            level, self._level = self._level, logging.DEBUG  # told once
            log.log(level, "items are taken past the cache where it fails; here item %d: %s", index, error, exc_info=True)
            return item


def _length(dataset: Any) -> int:
    try:
        if not isinstance(dataset, IterableDataset):
            return len(dataset)
    except TypeError:
        log.debug("a %s has no length", type(dataset).__name__)
    kind = type(dataset).__name__
    raise errors.ConfigError(f"a map-style dataset is wanted, with __len__ and __getitem__: {kind} is none", name="dataset", value=kind)
