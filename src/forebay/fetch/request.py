"""An object of a remote: its space and keys, and the options of one call for it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

from forebay import _config, errors
from forebay._engine.index.memo import Remembered
from forebay._kernel import host, interrupts, waits
from forebay._model import URLS, Content, ObjectInfo, Remote, noted
from forebay.remote import urls

if TYPE_CHECKING:
    from forebay._engine.flight import OnWait
    from forebay._engine.leases import Lease
    from forebay.fetch import Fetcher
    from forebay.remote import RemoteOptions

PARTS = "#block"
"""What follows the key of an object in the keys of its index and of all of its blocks: no key of an object has it, see `without_marks`."""

FOREVER = 1 << 60
"""Nanoseconds: 36 years. An invalidated entry (validated in 1970) is older even than this."""

POSTPONED = 30_000_000_000
"""Nanoseconds until a remote that could not be reached is asked again whether an object has changed."""

_REMOTE = ("http", "s3:")


class Target(NamedTuple):
    """A URL, the remote that serves it, and the space and key under which it is stored. ``above``: the key in the upstream root.
    ``options``: with which the remote is asked, if not with those of the cache. Only ``url`` and ``options`` may contain secrets."""

    url: str
    key: str
    suffix: str
    resolve: Callable[[], Remote]
    in_place: str | None = None
    above: str = ""
    space: str = URLS
    options: RemoteOptions | None = None

    @property
    def remote(self) -> Remote:
        """What serves the URL."""
        return self.resolve()


class ReadOptions(TypedDict, total=False):
    """The keywords of the methods of a cache that fetch objects.

    ``max_age``: seconds for which an entry is served without asking the remote, or ``"forever"``. ``refresh``: ask the remote now.
    ``filesystem``: an fsspec or pyarrow filesystem; the URL is a path on it. ``sha256``, ``etag``: the expected value; another raises
    `ChecksumMismatch`. ``timeout``: seconds to wait for other processes. ``bypass``: neither search the cache nor write to it.
    ``force``: store a local file too. ``pin``: never evict the object. ``offline``: do not ask the remote. ``on_wait``: called about once
    a second while another process fetches the object."""

    max_age: float | str | None
    refresh: bool
    filesystem: Any
    sha256: str | None
    etag: str | None
    timeout: float | None
    bypass: bool
    force: bool
    pin: bool
    offline: bool | None
    on_wait: OnWait | None


class FetchOptions(NamedTuple):
    """The options of one call. ``since``: the oldest acceptable validation time, in nanoseconds of the store's clock; 1 accepts any age,
    -1 also invalidated entries. ``refresh``: serve only what was validated after the call began, whatever the clock says. ``timeout``:
    seconds to wait for another process. ``bypass``: neither search the cache nor write to it. ``force``: store a local file too. ``wait``:
    how long all requests of the call together may wait for connections; None: without a limit. ``listed``: how a listing that this call
    requested describes the object. ``ahead``: the bytes are for later calls. ``life``: of the entry, unless ``pin``."""

    since: int = 1
    offline: bool = False
    sha256: str | None = None
    etag: str | None = None
    timeout: float | None = None
    bypass: bool = False
    force: bool = False
    pin: bool = False
    on_wait: OnWait | None = None
    on_progress: Callable[[int, int | None], None] | None = None
    refresh: bool = False
    wait: waits.SharedLimit | None = None
    listed: ObjectInfo | None = None
    ahead: bool = False
    life: str = "cached"

    @classmethod
    def of(
        cls, fetcher: Fetcher, *, on_progress: Callable[[int, int | None], None] | None = None, max_age: float | str | None = None,
        refresh: bool = False, filesystem: Any = None, sha256: str | None = None, etag: str | None = None, timeout: float | None = None,
        bypass: bool = False, force: bool = False, pin: bool = False, offline: bool | None = None, on_wait: OnWait | None = None,
    ) -> Self:  # fmt: skip
        """The options of a call that begins now, with the defaults of the cache; ``filesystem`` is that of the target. See `ReadOptions`.

        Raises `ConfigError`."""
        offline = fetcher.offline if offline is None else offline
        age = fetcher.max_age if max_age is None else _config.parse_age(max_age, name="max_age") * 1_000_000_000
        now = fetcher.store.now(exact=refresh)
        since = -1 if offline else now if refresh else 1 if age >= FOREVER else max(1, now - int(age))
        sha256 = None if sha256 is None else _config.parse_sha256(sha256)
        etag = _config.parse_etag(etag)
        _check_callable(on_wait, "on_wait")
        _check_callable(on_progress, "on_progress")
        timeout = fetcher.timeout if timeout is None else _config.parse_timeout(timeout)
        wait = None if timeout is None else waits.SharedLimit(timeout)
        watch = None if on_progress is None else _watched(on_progress)
        return cls(since, offline, sha256, etag, timeout, bypass, force, pin, on_wait, watch, refresh and not offline, wait)


def _check_callable(value: object, name: str) -> None:
    if value is not None and not callable(value):
        raise errors.ConfigError(f"{name} must be a function, not {value!r}", name=name, value=value)


def _watched(on_progress: Callable[[int, int | None], None]) -> Callable[[int, int | None], None]:
    """``on_progress``, whose errors are the caller's own, also those of other objects that it reads."""

    def watch(done: int, total: int | None) -> None:
        try:
            on_progress(done, total)
        except errors.ForebayError as error:
            error.callers_own = True
            raise

    return watch


def first_touch(fetcher: Fetcher, url: str | os.PathLike[str], *, force: bool) -> memoryview | None:
    """A fresh cached object that this process has not read before, found by the index of keys without a lock or a lease; else None.
    None does not mean that it is not cached. Raises `ConfigError`."""
    text = url if type(url) is str else urls.as_text(url)
    hit = fetcher.store.hot_lookup(URLS) if "#" in text or "@" in text else None  # by its key alone: see `Memo.alias`
    for key in _possible_keys(fetcher, text, force=force):
        if hit is not None and (data := hit(key, fetcher.max_age)) is not None:
            return data
        data = fetcher.store.first_touch(URLS, key, fetcher.max_age, fetcher.alias(text, key))
        if data is not None:
            return data
    return None


def is_there(fetcher: Fetcher, url: str | os.PathLike[str]) -> bool:
    """Whether `first_touch` would find an object. Touches it, so that colder objects are evicted first. Raises `ConfigError`."""
    store = fetcher.store
    if not store.keeps:
        return False
    with contextlib.suppress(errors.CacheFault):
        keys = _possible_keys(fetcher, urls.as_text(url), force=False)
        return any(store.prefetching.expect(URLS, key, fetcher.max_age) is not None for key in keys)
    return False


def _possible_keys(fetcher: Fetcher, text: str, *, force: bool) -> Iterator[str]:
    """The keys under which the cache may have a URL. Raises `ConfigError`."""
    if fetcher.closed or not text:
        return
    # A text of `canonical` without a `#` or `@` is its own key, unless the realm changes it. Parsing it would cost more than the look-up.
    is_likely_key = text.startswith(_REMOTE) and "#" not in text and "@" not in text and not fetcher.realm(text.partition(":")[0])
    if is_likely_key:
        yield text
    key = urls.canonical(text, fetcher.naming) if fetcher.realm.is_usual else fetcher.target(text).key  # which `hot_lookup` has made
    if not (is_likely_key and key == text) and (force or not key.startswith("file:")):  # a local file is its own copy
        yield key


def is_same_version(validator: str | None, expected: str) -> bool:
    """Whether two validators name the same version, with or without their quotes."""
    return (validator or "").removeprefix("W/").strip('"') == expected.removeprefix("W/").strip('"')


def is_expected(found: Lease | Remembered, options: FetchOptions) -> bool:
    """Whether an entry has the ETag and the SHA-256 that the caller expects, if it expects any."""
    if options.etag and not is_same_version(found.entry.validator, options.etag):
        return False
    if options.sha256 is None:
        return True
    known = noted(found.entry.meta, sha256=str)
    content: Content = found.view if isinstance(found, Remembered) else found.path
    return bool((known["sha256"] if known else sha256_of(content)) == options.sha256.lower())


def sha256_of(content: Content) -> str:
    """The digest of bytes, or of the content of a file."""
    import hashlib

    if isinstance(content, (bytes, bytearray, memoryview)):
        return hashlib.sha256(content).hexdigest()
    with open(content, "rb", opener=host.open_fd) as file:
        return interrupts.digest(file, hashlib.sha256())


def folder_of(key: str) -> str:
    """The key of a directory, from the key of an object of the same name."""
    head, mark = split_hash(key)
    return head.rstrip("/") + "/" + mark


def split_hash(key: str) -> tuple[str, str]:
    """A key without the hash at its end, and that: of a query, or of a filesystem object."""
    match = re.search(r"(?:\?q=|#)[0-9a-f]{32}\Z", key)
    return (key, "") if match is None else (key[: match.start()], match[0])


def index_key(key: str) -> str:
    """The key of the entry that describes the version of an object whose blocks are cached, from the key of the object. It has no bytes:
    size and validator are in its row."""
    return f"{key}{PARTS}s"


def block_key(key: str, number: int, size: int, validator: str | None) -> str:
    """The key of block ``number`` of ``size`` bytes of one version of an object."""
    return f"{key}{PARTS}={number}&size={size}&version={validator}"
