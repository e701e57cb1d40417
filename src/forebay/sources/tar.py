"""The members of tar shards as items: read with an index of each shard, and range requests for members."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import islice, takewhile
from typing import Any, NamedTuple
from urllib.parse import unquote

from forebay import errors
from forebay._kernel import interrupts
from forebay._kernel.interrupts import guarded_methods
from forebay._kernel.threads import Threads
from forebay._logs import logger
from forebay._model import SourceInfo
from forebay.fetch import Fetcher
from forebay.fetch.prefix import Prefix, RemoteAccess, checked_key, is_name
from forebay.remote import RemoteOptions, as_text, bare
from forebay.sources.shards import Indexed, ShardIndexes

log = logger("forebay.sources")

AT_ONCE = 8
"""Shards whose indexes are built concurrently for a list of all keys."""

SILENCE = 10.0
"""Seconds for which a shard has no version after its remote did not answer: otherwise each request would wait for all retries."""

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class _Indexing(NamedTuple):
    """A shard whose index a thread builds."""

    shard: str
    url: str
    built: Future[Indexed]


@guarded_methods("identity")
class TarSource:
    """The members of tar shards, such as webdataset's: ``TarSource("s3://bucket/train")["shard-000017.tar/000123.jpg"]``.

    ``shards``: the path or URL of a shard, also as ``shard-{000..999}.tar``; several of them; or a directory or URL prefix: all ``.tar``
    files below it. A key is the shard's path below the common directory of all shards, a slash, and the member's name. ``filesystem``: an
    fsspec or pyarrow filesystem; ``shards`` are paths on it. ``version``: the version of the whole dataset; by default an item has its
    shard's version: its ETag, or its time and size.

    Reads only the bytes of members. It builds an index of a shard from its headers on first use: once per node, stored in the cache, if the
    source is bound to one; else once per process. A shard that changes later is indexed again. Supports uncompressed tars of all formats.
    If members share a name, the last one counts. Omits what is neither a regular file nor a hard link to an earlier one.

    Callable from any thread and after a fork; picklable if the filesystem is. Raises `ConfigError`, `MissingExtra`."""

    def __init__(
        self, shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, filesystem: Any = None, version: str | None = None,
        options: RemoteOptions | None = None,
    ) -> None:  # fmt: skip
        given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
        self._reach, self.version, self.options = RemoteAccess(filesystem, options), version, options
        self._shards = ShardIndexes(self._reach)
        self._silent: dict[str, float] = {}
        texts = [text for each in given for text in expanded(as_text(each))]
        self._prefix, self._known_urls = None, None
        if len(given) == 1 and not is_tar(texts[0]):
            self._prefix = _checked_prefix(Prefix(texts[0], plain=filesystem is not None))
            self.uri = self._reach.shown(self._prefix.url)
        else:
            self.uri, self._known_urls = _laid_out(self._reach, texts)

    def __repr__(self) -> str:
        return f"TarSource({self.uri!r})"

    @property
    def identity(self) -> str:
        """What distinguishes its items from those of other sources: its prefix, or all its shards, as the bound cache names them."""
        urls = [self._prefix.url] if self._prefix is not None else self._urls().values()
        return " ".join(map(self._reach.key, urls))

    def bind(self, fetcher: Fetcher) -> None:
        """Use this cache: its options, its counters, and its storage for the indexes. The prefetcher calls this."""
        self._reach.bind(fetcher)

    # -- items -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> bytes:
        """The member's bytes. Raises `NotFound`, `BadArchive` for a damaged shard, or another `RemoteError`."""
        shard, name = self._split(key)
        for last in (False, True):
            indexed = self._shards.index(self._url(shard))
            try:
                return self._read(shard, name, indexed)
            except (errors.RemoteChanged, errors.BadArchive):
                if last:
                    raise
                self._shards.forget(self._url(shard), indexed.info)
        raise AssertionError("unreachable: the last turn returns or raises")

    def kept(self, key: str, *, only_whether: bool = False) -> bytes | None:
        """The member's bytes from the whole shard, if the bound cache has it; else None. Asks no remote, and raises nothing.
        ``only_whether``: return no bytes."""
        try:
            shard, name = self._split(key)
            url = self._url(shard)
        except errors.ForebayError:
            return None
        indexed = self._shards.known_index(url)
        span = indexed.members.get(name) if indexed is not None else None
        if indexed is None or span is None or indexed.info.validator is None:
            return None
        return self._reach.kept_part(url, span._replace(length=0) if only_whether else span, indexed.info.validator)

    def _read(self, shard: str, name: str, indexed: Indexed) -> bytes:
        span = indexed.members.get(name)
        if span is None:
            raise errors.NotFound(f"{self._shown(shard)} has no member {name!r}", url=self._shown(shard))
        data = self._reach.part(self._url(shard), span, indexed.info)
        if len(data) < span.length:
            message = f"{self._shown(shard)}: cut short within {name!r}, at byte {span.start + len(data):,}"
            raise errors.BadArchive(message, url=self._shown(shard), offset=span.start + len(data))
        return data

    def keys(self) -> Iterator[str]:
        """All members, shard by shard, in order. Builds missing indexes, several shards at a time. Closing the iterator does not wait for
        indexes that are being built."""
        threads = Threads(self._index, AT_ONCE, name="index")
        shards, window = iter(self._urls().items()), deque[_Indexing]()
        try:
            while True:
                for shard, url in islice(shards, AT_ONCE - len(window)):
                    window.append(_Indexing(shard, url, Future()))
                    if not threads.submit(window[-1]):  # no further thread may be started
                        self._index(window[-1])
                if not window:
                    return
                first = window.popleft()
                any(wait([first.built], turn).done for turn in interrupts.turns())
                yield from (f"{first.shard}/{name}" for name in first.built.result().members)
        finally:
            threads.close()

    def _index(self, indexing: _Indexing) -> None:
        try:
            indexing.built.set_result(self._shards.index(indexing.url))
        except interrupts.Delivered:
            raise
        except BaseException as error:  # noqa: BLE001 (raised where the index is wanted)
            indexing.built.set_exception(error)

    def shards(self) -> list[str]:
        """The names of the shards, in order. Raises `RemoteError`."""
        return list(self._urls())

    def size(self, key: str) -> int | None:
        """Bytes of a member; None if unknown: reading it then raises the error."""
        try:
            shard, name = self._split(key)
            span = self._shards.index(self._url(shard)).members.get(name)
        except (errors.RemoteError, errors.Offline):
            return None
        return None if span is None else span.length

    def version_of(self, key: str) -> str | None:
        """The version of the shard on the remote: requested once per shard, by the first process of the node that needs it.

        None if the whole source has a version, or if this one is unknown: then it is not requested again for some seconds."""
        if self.version is not None:
            return None
        try:
            url = self._url(self._split(key)[0])
        except (errors.RemoteError, errors.Offline):
            return None
        if time.monotonic() < self._silent.get(url, 0.0):
            return None
        try:
            return self._shards.info(url).validator
        except (errors.RemoteError, errors.Offline):
            self._silent[url] = time.monotonic() + SILENCE
            return None

    def info(self, key: str) -> SourceInfo:
        """The provenance of an item."""
        shard, name = self._split(key)
        return SourceInfo(self.uri, key, shard, (name,))

    # -- shards ----------------------------------------------------------------------------------------------------

    def _urls(self) -> dict[str, str]:
        """The URLs of the shards by name, in order. Omits names that are not below the prefix, with one warning."""
        if self._known_urls is None:
            assert self._prefix is not None
            infos = {self._prefix.name_of(info.url): info for info in self._reach.list(self._prefix.folder) if info.url.endswith(".tar")}
            if not infos:
                raise errors.NotFound(f"{self.uri}: no .tar below it", url=self.uri)
            others = [name for name in infos if not is_name(name)]
            if others:
                log.warning("%s: %r is outside the source; such shards are skipped", self.uri, others[0])
            urls = {name: self._prefix.join(name) for name in infos if is_name(name)}
            for name, url in urls.items():
                self._shards.learn(url, infos[name])
            self._known_urls = urls
        return self._known_urls

    def _url(self, shard: str) -> str:
        return self._urls()[shard]

    def _shown(self, shard: str) -> str:
        return self._reach.shown(self._url(shard))

    def _split(self, key: str) -> tuple[str, str]:
        """The shard and the member of a key. Raises `ConfigError` for what is no key."""
        urls, key = self._urls(), checked_key(key) if key else ""
        at = key.find("/")
        while at >= 0:
            if key[:at] in urls:
                return key[:at], key[at + 1 :]
            at = key.find("/", at + 1)
        raise errors.NotFound(f"{key!r}: no shard of {self.uri} has this name: a key is shard.tar/member", url=self.uri)


def is_tar(text: str) -> bool:
    """Whether a path or URL names a shard."""
    return (bare(text) if "://" in text else text).endswith(".tar")


def expanded(text: str) -> Iterator[str]:
    """All names that ``shard-{08..10}.tar`` stands for."""
    match = _RANGE.search(text)
    if match is None:
        yield text
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from expanded(f"{text[: match.start()]}{number:0{len(first)}d}{text[match.end() :]}")


def _checked_prefix(prefix: Prefix) -> Prefix:
    if prefix.url.lower().startswith(("http://", "https://")):
        message = f"{bare(prefix.url)}: HTTP has no listings: name the shards, as in .../shard-{{000..099}}.tar"
        raise errors.ConfigError(message, name="shards", value=bare(prefix.url))
    return prefix


def _laid_out(reach: RemoteAccess, texts: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The URI of a dataset whose shards are named one by one, and the URLs of the shards by name, in order."""
    urls = [Prefix(text, plain=reach.filesystem is not None).url for text in texts]
    if not urls:
        raise errors.ConfigError("no shards: name at least one", name="shards", value=None)
    parts = [bare(url).split("/") for url in urls]
    folders = [each[:-1] for each in parts]
    common = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*folders, strict=False)))
    if "://" in urls[0] and common < 3:  # on several hosts, or in several buckets
        names = [reach.shown(url) for url in urls]
        uri = names[0].partition("://")[0] + "://"
    else:
        quoted = urls[0].lower().startswith(("http://", "https://"))
        names = ["/".join(each[common:]) for each in parts]
        names = [unquote(name, errors="surrogateescape") for name in names] if quoted else names
        uri = reach.shown("/".join(parts[0][:common]) or "/")
    urls_by_name = dict(zip(names, urls, strict=True))
    if len(urls_by_name) < len(urls):
        twice = next(name for name in names if names.count(name) > 1)
        raise errors.ConfigError(f"the shard {twice!r} is named twice", name="shards", value=twice)
    return uri, urls_by_name
