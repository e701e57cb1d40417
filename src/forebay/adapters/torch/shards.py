"""An iterable dataset over tar shards: shuffled by epoch, split by rank and worker, resumed in the middle of an epoch."""

from __future__ import annotations

import hashlib
import multiprocessing.context
import operator
import os
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch.utils.data import IterableDataset, get_worker_info

from forebay import _config, errors, remote
from forebay._kernel.interrupts import unless_of_handler
from forebay._logs import logger
from forebay._model import Span
from forebay.adapters.torch.datasets import opened
from forebay.cache import Cache
from forebay.remote.urls import Url
from forebay.sources import Decode, by_extension, tar_index
from forebay.sources.tar import expanded
from forebay.world import World

log = logger("forebay.adapters.torch")

_Group = tuple[str, list[tuple[str, str, Span]]]  # the key of a sample; name, extension and place of each member
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_EPOCH, _IN_WORKERS = 0, 1  # of the words that a dataset shares with its copies in workers


class Shards(IterableDataset):  # type: ignore[misc]  # PyTorch is optional: to mypy it is Any
    """The samples of tar shards: ``{"__key__": "000017", "__url__": ..., "jpg": bytes, "cls": bytes}``, grouped as webdataset groups them.

    Each rank, and each of its DataLoader workers, reads its own whole shards: a shard is fetched once into the cache, and read from there.

    ``urls``: URLs of the shards; ``shard-{000..999}.tar`` names a thousand. ``ahead``: shards to prefetch, within a quarter of the budget,
    see `Cache.lookahead`. ``shuffle_shards``: use an order that differs by ``seed`` and epoch, see `set_epoch`, and is the same in all
    ranks. ``buffer``: samples that a worker keeps in memory and draws from at random; 0 keeps the order. ``decode``: as for
    `Cache.prefetcher`, called with the name and bytes of each member; a dict from extensions works as in `forebay.sources.by_extension`.
    ``cache``: an open `Cache`, or the arguments to open one. ``world``: ranks and nodes, if `World.detect` cannot know them.

    If the cache has no room, a shard stays in memory until it has been read, and is fetched again in the next epoch. Damaged shards raise
    `BadArchive`, others their `RemoteError`; iterating further continues with the next shard. Picklable if ``decode`` is; usable in both
    processes after a fork. For one thread. Raises `ConfigError`, and what opening the cache raises."""

    def __init__(
        self, urls: Url | Iterable[Url], *, cache: Cache | Mapping[str, Any] | None = None, shuffle_shards: bool = False,
        buffer: int = 0, seed: int = 0, decode: Decode | Mapping[str, Decode] | None = None, ahead: int = 2, world: World | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("buffer", buffer), ("ahead", ahead)):
            _config.parse_count(value, name=name, least=0)
        given = [urls] if isinstance(urls, str | os.PathLike) else urls
        self.urls = [text for each in given for text in expanded(remote.as_text(each))]
        if not self.urls:
            raise errors.ConfigError("no shards: name at least one", name="urls", value=None)
        chosen = by_extension(decode) if isinstance(decode, Mapping) else decode
        self._cache, self._decode, self._ahead, self._buffer = opened(cache), chosen, ahead, buffer
        # What must be the same where a state is loaded.
        self._identity = {"shards": _digest(self.urls), "shuffle_shards": bool(shuffle_shards), "buffer": buffer, "seed": int(seed)}
        self._world = world
        self._spawned_by: World | None = None  # the world of the process that spawned the process `_spawned`
        self._spawned = 0
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._position: _Position | None = None
        self._resumes = False
        self._world_here()  # ranks that must ask each other how many a node has can do so now, and not in a worker

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, also in persistent workers. All ranks must set the same epoch."""
        self._shared[_EPOCH] = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The samples of this rank and worker: all of this epoch, or those that the state leaves that was loaded last."""
        world = self._world_here()
        if get_worker_info() is not None:
            self._shared[_IN_WORKERS] = 1
        if self._position is None or not self._resumes:
            self._position = _Position(_Share.of(world), int(self._shared[_EPOCH]))
        self._position.share.check(world)
        self._resumes = False
        order = self.urls
        if self._identity["shuffle_shards"]:
            order = random.Random(f"{self._identity['seed']} {self._position.epoch}").sample(order, len(order))
        own = order[world.rank :: world.num_ranks][world.worker_of_rank :: world.workers_per_rank]
        if not own:
            log.warning("%d shards for %d workers: %s has none", len(self.urls), world.num_workers, self._position.share)
        return _Pass(self, self._position, own)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of this process's last iteration: numbers only, a few per sample in the buffer.

        torchdata's StatefulDataLoader collects its workers' states. Raises `ConfigError` in a process whose workers iterate."""
        if self._position is None and self._shared[_IN_WORKERS] and get_worker_info() is None:
            message = "the workers have the positions, and this process has none: use torchdata's StatefulDataLoader, or num_workers=0"
            raise errors.ConfigError(message, name="state_dict", value=None)
        position = self._position or _Position(_Share.of(self._world_here()), int(self._shared[_EPOCH]))
        return {**self._identity, **position.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration return exactly the samples that were left when this state was saved.

        Raises `ConfigError` if it is no such state, or was saved with other shards, another seed, buffer or order, by another rank or
        worker, or with another number of ranks or workers."""
        if not isinstance(state, Mapping):
            raise _no_state("state", state)
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise _mismatch(name, state.get(name), value)
        position = _Position.of(state)
        position.share.check(self._world_here())
        self._position, self._resumes = position, True
        self.set_epoch(position.epoch)

    # -- ranks, workers and pickles --------------------------------------------------------------------------------

    def _world_here(self) -> World:
        if self._world is not None:
            return self._world.detect_workers()
        if self._spawned_by is not None and self._spawned == os.getpid() and get_worker_info() is not None:
            return self._spawned_by.detect_workers()
        return World.detect()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not know what its rank knows. Whatever else unpickles this may be another rank.
        world = World.detect() if multiprocessing.context.get_spawning_popen() is not None else None
        position = self._position if self._resumes else None
        return vars(self) | {"_spawned_by": world, "_position": position}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spawned = os.getpid()
        self._shared.share_memory_()  # one that came by a plain pickle is in no memory that workers see


def _digest(urls: Iterable[str]) -> str:
    """Without secrets: the signature of a signed URL may be another one when a state is loaded, on any machine."""
    digest = hashlib.blake2b(digest_size=16)
    for url in urls:
        digest.update(remote.canonical(url).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _mismatch(name: str, saved: object, here: object) -> errors.ConfigError:
    return errors.ConfigError(f"this state was saved with {name}={saved!r}, and here it is {here!r}", name=name, value=saved)


def _no_state(name: str, value: object) -> errors.ConfigError:
    message = f"this is no state of `Shards`, as `state_dict` returns it: {name}={value!r:.100}"
    return errors.ConfigError(message, name=name, value=f"{value!r:.100}")


class _Share(NamedTuple):
    """Whose part of the shards: the ``worker``-th of ``num_workers`` of the ``rank``-th of ``num_ranks``."""

    rank: int
    num_ranks: int
    worker: int
    num_workers: int

    @classmethod
    def of(cls, world: World) -> _Share:
        return cls(world.rank, world.num_ranks, world.worker_of_rank, world.workers_per_rank)

    def check(self, world: World) -> None:
        """Raises `ConfigError` where this process has another part."""
        here = _Share.of(world)._asdict()
        for name in ("num_ranks", "num_workers", "rank", "worker"):
            if here[name] != getattr(self, name):
                raise _mismatch(name, getattr(self, name), here[name])

    def __str__(self) -> str:
        return f"worker {self.worker} of {self.num_workers} of rank {self.rank} of {self.num_ranks}"


@dataclass(slots=True)
class _Position:
    """Where an iteration stands: the sample that is read next is the one with the number ``sample`` in the shard whose turn is ``turn``.
    ``drawn``: random numbers so far. ``turns``, ``samples``: of what the buffer has, in its order."""

    share: _Share
    epoch: int
    turn: int = 0
    sample: int = 0
    drawn: int = 0
    turns: array[int] = field(default_factory=lambda: array("q"))
    samples: array[int] = field(default_factory=lambda: array("q"))

    def state(self) -> dict[str, Any]:
        own = {"epoch": self.epoch, "turn": self.turn, "sample": self.sample, "drawn": self.drawn}
        return {**self.share._asdict(), **own, "buffered_turns": self.turns.tolist(), "buffered_samples": self.samples.tolist()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Position:
        """Raises `ConfigError` for what `state` does not return."""
        numbers: list[int] = []
        for name in (*_Share._fields, "epoch", "turn", "sample", "drawn"):
            value = state.get(name)
            numbers.append(operator.index(value) if isinstance(value, SupportsIndex) else -1)
            if numbers[-1] < 0:
                raise _no_state(name, value)
        try:
            turns, samples = array("q", state["buffered_turns"]), array("q", state["buffered_samples"])
        except unless_of_handler(KeyError, TypeError, ValueError, OverflowError) as error:
            raise _no_state("buffered_turns", state.get("buffered_turns")) from error
        if len(turns) != len(samples) or min((*turns, *samples), default=0) < 0:
            raise _no_state("buffered_turns", state["buffered_turns"])
        epoch, turn, sample, drawn = numbers[4:]
        return cls(_Share(*numbers[:4]), epoch, turn, sample, drawn, turns, samples)


class _Pass(Iterator[dict[str, Any]]):
    """One iteration, which moves ``position`` with each sample. ``own``: the shards of this worker."""

    def __init__(self, dataset: Shards, position: _Position, own: Sequence[str]) -> None:
        self._dataset, self._at, self._own = dataset, position, own
        self._buffer: list[_Sample] | None = None
        self._upcoming: Iterator[_Shard] | None = None
        self._shard: _Shard | None = None

    def __next__(self) -> dict[str, Any]:
        buffer, at = self._filled(), self._at
        while (sample := self._read()) is not None:
            if not self._dataset._buffer:
                return self._decoded(sample)
            if len(buffer) < self._dataset._buffer:
                buffer.append(sample)
                at.turns.append(sample.turn)
                at.samples.append(sample.number)
                continue
            drawn = self._draw(len(buffer))
            taken, buffer[drawn] = buffer[drawn], sample
            at.turns[drawn], at.samples[drawn] = sample.turn, sample.number
            return self._decoded(taken)
        if not buffer:
            raise StopIteration
        drawn = self._draw(len(buffer))
        taken, last = buffer[drawn], buffer.pop()
        at.turns.pop()
        at.samples.pop()
        if drawn < len(buffer):
            buffer[drawn], at.turns[drawn], at.samples[drawn] = last, last.turn, last.number
        return self._decoded(taken)

    def _draw(self, count: int) -> int:
        """A number below ``count`` that depends on how many were drawn, so that a state need not hold that of a generator."""
        share, at = self._at.share, self._at
        at.drawn += 1
        text = f"{self._dataset._identity['seed']} {at.epoch} {share.rank} {share.worker} {at.drawn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % count

    def _decoded(self, sample: _Sample) -> dict[str, Any]:
        decode = self._dataset._decode
        item: dict[str, Any] = {"__key__": sample.key, "__url__": sample.url}
        for name, extension, data in sample.members:
            item[extension] = data if decode is None else decode(name, data)
        return item

    # -- reading ---------------------------------------------------------------------------------------------------

    def _filled(self) -> list[_Sample]:
        """The buffer; at first with what the position says that it has, read again."""
        if self._buffer is None:
            samples: dict[tuple[int, int], _Sample] = {}
            places = list(zip(self._at.turns, self._at.samples, strict=True))
            for shard in self._shards(sorted({turn for turn, _ in places})):
                for turn, number in places:
                    if turn == shard.turn:
                        samples[turn, number] = _checked(shard, number + 1).sample(number)
            self._buffer = [samples[place] for place in places]
        return self._buffer

    def _read(self) -> _Sample | None:
        """The next sample of the shards; None after the last."""
        at = self._at
        if self._upcoming is None:
            self._upcoming = self._shards(range(at.turn, len(self._own)))
        while True:
            if self._shard is None:
                try:
                    self._shard = next(self._upcoming, None)
                    if self._shard is None:
                        return None
                    _checked(self._shard, at.sample)
                except unless_of_handler(Exception):
                    self._next_shard()
                    raise
                except BaseException:  # of a signal handler: which shard the iterator has come to is not known
                    self._upcoming = None
                    raise
            if at.sample < len(self._shard):
                at.sample += 1
                return self._shard.sample(at.sample - 1)
            self._next_shard()

    def _shards(self, turns: Sequence[int]) -> Iterator[_Shard]:
        """The shards of these turns: while one is read, the next ones are fetched. Raises `RemoteError` and `BadArchive`; the call after
        that returns the shard behind.

        What is under way when the iterator is dropped is fetched to its end, into the cache."""
        cache, ahead, urls = self._dataset._cache, self._dataset._ahead, [self._own[turn] for turn in turns]
        data: Iterator[memoryview] = cache.lookahead(urls, most=ahead, workers=ahead + 1) if ahead else map(cache.read, urls)
        return map(_Shard, turns, urls, data)

    def _next_shard(self) -> None:
        self._shard = None
        self._at.turn, self._at.sample = self._at.turn + 1, 0


def _checked(shard: _Shard, count: int) -> _Shard:
    """A shard that has so many samples at least. Raises `RemoteChanged`."""
    if len(shard) < count:
        message = f"{shard.url} has changed since the state was saved: it has {len(shard):,} samples, and had {count:,} at least"
        raise errors.RemoteChanged(message, url=shard.url)
    return shard


class _Sample(NamedTuple):
    """The members of a shard that share a key. ``turn``: of its shard among those of the worker; ``number``: of the sample in the shard.
    ``members``: the name in the tar, the extension in lower case, and the bytes of each."""

    turn: int
    number: int
    url: str
    key: str
    members: tuple[tuple[str, str, bytes], ...]


class _Shard:
    """A whole shard in mapped memory, or in memory: its samples by number. Raises `BadArchive`, which names the shard."""

    def __init__(self, turn: int, url: str, data: memoryview) -> None:
        self.turn, self.url, self._data = turn, remote.shown(url), data
        self._groups = _grouped(tar_index.members(data, self.url), self.url)

    def __len__(self) -> int:
        return len(self._groups)

    def sample(self, number: int) -> _Sample:
        """A copy of a sample."""
        key, members = self._groups[number]
        copied = tuple((name, extension, bytes(self._data[span.start : span.end])) for name, extension, span in members)
        return _Sample(self.turn, number, self.url, key, copied)


def _grouped(members: Mapping[bytes, Span], url: str) -> list[_Group]:
    """Neighbours with the same name up to the first dot behind the last slash, as webdataset groups them. Raises `BadArchive` if two of
    them have the same extension."""
    groups: list[_Group] = []
    for raw, span in members.items():
        name = raw.decode("utf-8", "surrogateescape")
        match = _KEY.fullmatch(name)
        if match is None:
            continue
        key, extension = match[1], match[2].lower()
        if not groups or groups[-1][0] != key:
            groups.append((key, []))
        elif any(other == extension for _, other, _ in groups[-1][1]):
            message = f"{url}: two members of the sample {key!r} have the extension {extension!r}, at byte {span.start:,}"
            raise errors.BadArchive(message, url=url, offset=span.start)
        groups[-1][1].append((name, extension, span))
    return groups
