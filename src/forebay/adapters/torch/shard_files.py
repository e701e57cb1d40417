"""Tar shards that are fetched whole before their turn, and their samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from forebay import errors
from forebay._model import Span
from forebay.cache import Cache
from forebay.remote.urls import shown
from forebay.sources import tar_index

_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)


class Field(NamedTuple):
    """A member of a sample: its name in the tar, its extension in lower case, its bytes."""

    name: str
    extension: str
    data: bytes


class Sample(NamedTuple):
    """The members of a shard that share a key. ``turn``: of its shard among those of the worker; ``number``: of the sample in the shard."""

    turn: int
    number: int
    url: str
    key: str
    fields: tuple[Field, ...]


class _Group(NamedTuple):
    key: str
    members: list[tuple[str, str, Span]]


class ShardFile:
    """A whole shard in mapped memory, or in memory: its samples by number. Raises `BadArchive`, which names the shard."""

    def __init__(self, turn: int, url: str, data: memoryview) -> None:
        self.turn, self.url, self._data = turn, shown(url), data
        self._groups = _grouped(tar_index.members(data, self.url), self.url)

    def __len__(self) -> int:
        return len(self._groups)

    def sample(self, number: int) -> Sample:
        """A copy of a sample."""
        group = self._groups[number]
        fields = (Field(name, extension, bytes(self._data[span.start : span.end])) for name, extension, span in group.members)
        return Sample(self.turn, number, self.url, group.key, tuple(fields))


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
        if not groups or groups[-1].key != key:
            groups.append(_Group(key, []))
        elif any(other == extension for _, other, _ in groups[-1].members):
            message = f"{url}: two members of the sample {key!r} have the extension {extension!r}, at byte {span.start:,}"
            raise errors.BadArchive(message, url=url, offset=span.start)
        groups[-1].members.append((name, extension, span))
    return groups


class ShardFiles:
    """Shards in the order of their turns: while one is read, the next ``ahead`` are fetched. ``shards``: their turns and URLs.

    For one thread; usable in both processes after a fork. What is under way when this object is dropped is fetched to its end, into the
    cache."""

    def __init__(self, cache: Cache, shards: Sequence[tuple[int, str]], ahead: int) -> None:
        self._shards = iter(shards)
        urls = [url for _, url in shards]
        self._read: Iterator[memoryview] = cache.lookahead(urls, most=ahead, workers=ahead + 1) if ahead else map(cache.read, urls)

    def take(self) -> ShardFile | None:
        """The next shard, None after the last. Raises `RemoteError`, `BadArchive`; the call after that takes the shard behind."""
        shard = next(self._shards, None)
        return None if shard is None else ShardFile(*shard, next(self._read))
