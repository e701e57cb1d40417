"""A map-style dataset of PyTorch, each item of which is decoded once for all workers and ranks of the node."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from forebay import errors
from forebay.samples import Samples

try:
    from torch.utils.data import Dataset, IterableDataset
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.torch", "torch") from error

__all__ = ["CachedDataset"]

log = logging.getLogger("forebay.adapters.torch")


class CachedDataset(Dataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """``dataset`` behind an array of samples: ``dataset[i]`` runs once for the node, and what it gave is kept.

    ``samples``: an open array of ``len(dataset)`` slots, as ``cache.samples(name, len(dataset), codec="pickle")`` opens one.
    ``transform``: applied to what ``dataset[i]`` gave each time that it is asked for, and never stored: random augmentations.

    Items come as `Samples.get` gives them: tensors may be written to, arrays are read-only unless the array was opened with
    ``copy=True``; with the codec ``raw`` the transform gets a view, and without one the items are bytes. What ``dataset`` and
    ``transform`` raise reaches the caller; a fault of the cache never does, ``dataset[i]`` is then taken as if there were none.
    Picklable, usable in both processes after a fork, callable from any thread if ``dataset`` is.
    Raises `ConfigError` for anything but such an array, or one of another length; `Closed`."""

    def __init__(self, dataset: Any, samples: Samples, transform: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(samples, Samples):
            how = "open one with cache.samples(name, len(dataset), codec='pickle')"
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
                error.add_note("Items of a dataset are mostly objects: open their array with codec='pickle'.")
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
