"""A sampler that has objects fetched before a loader's worker asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from forebay import errors
from forebay.adapters.torch.datasets import UrlDataset


class Lookahead(Sampler):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """A sampler, or batch sampler, that yields what ``sampler`` yields, and has the objects of the next indices fetched meanwhile:
    ``DataLoader(dataset, sampler=Lookahead(RandomSampler(dataset), dataset))``.

    ``sampler``: yields indices of ``dataset``, or lists of them, in the process that runs the loader. ``dataset``: a `UrlDataset`.
    ``window``, ``workers``: as for `Cache.lookahead`, whose fetches run in that process, as far ahead as the window reaches: workers find
    the objects in the cache, or wait for those that are on their way. ``horizon``: so many indices are drawn in advance, at least, so that
    the cache keeps what is used soonest: for a sampler that repeats indices. Each iteration has a look-ahead of its own, which ends with
    it, with its process, or where the loader gives it up. ``set_epoch`` is that of the sampler. Raises `ConfigError`."""

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
