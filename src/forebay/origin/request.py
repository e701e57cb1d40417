"""An object of a remote, and the options of one call for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

from forebay import _config, errors, remote
from forebay._engine.index.memo import Remembered
from forebay._kernel import host, waits
from forebay._model import Content, ObjectInfo, Remote, noted
from forebay.origin.spaces import FOREVER, URLS
from forebay.remote import UrlNaming, urls

if TYPE_CHECKING:
    from forebay._engine.flight import OnWait
    from forebay._engine.index.memo import Hit
    from forebay._engine.locks.leases import Lease
    from forebay._engine.null_store import NullStore
    from forebay._engine.store import Store
    from forebay.origin import Origin

_REMOTE = ("http", "s3:")
_NO_ROOT = int.from_bytes(os.urandom(8)) >> 2  # in place of the secret of a root: nothing is stored under these keys


class Target(NamedTuple):
    """A URL: where it is fetched from, and the space and key under which it is stored; ``above``: the key in the upstream root. Only
    ``url`` may contain secrets."""

    url: str
    key: str
    suffix: str
    resolve: Callable[[], Remote]
    in_place: str | None = None
    above: str = ""
    space: str = URLS

    @property
    def remote(self) -> Remote:
        """What serves the URL."""
        return self.resolve()


class Targets:
    """What URLs are to one cache: the base of `Origin`. Callable from any thread and after a fork."""

    store: Store | NullStore
    upstream: Store | None

    def __init__(self, options: remote.RemoteOptions | None) -> None:
        self._options, self.realm = options, remote.Realm(options)
        self._naming = UrlNaming(_NO_ROOT, self.realm)
        self._targets: dict[str, Target] = {}
        self._resolvers = remote.Resolvers(lambda: self.options, self.realm)

    @host.cached_property
    def options(self) -> remote.RemoteOptions:
        """How requests are sent. Made by the first request."""
        return self._options or remote.RemoteOptions()

    @property
    def naming(self) -> UrlNaming:
        """How the keys of this cache are made: a root that could not be used until now, or was created anew, has another secret."""
        secret = self.store.root.id if self.store.keeps else _NO_ROOT
        if self._naming.secret != secret:
            self._naming = UrlNaming(secret, self.realm)
            self._targets.clear()
        return self._naming

    def target(self, url: str | os.PathLike[str], filesystem: Any = None) -> Target:
        """The target of a URL or path, or of a path of a filesystem object of fsspec or pyarrow. Raises `ConfigError`, `MissingExtra`."""
        text = remote.as_text(url)
        if not text:
            raise errors.ConfigError("an empty URL names nothing", name="url", value="")
        if filesystem is not None:
            return self.target_on(remote.on_filesystem(filesystem, self.options), text)
        naming = self.naming
        if (known := self._targets.get(text)) is not None:
            return known
        target = self.target_by(text, naming, self._resolvers.of(text))
        if len(self._targets) >= 10_000:
            self._targets.clear()
        self._targets[text] = target
        return target

    def target_by(self, url: str, naming: UrlNaming, resolve: Callable[[], Remote]) -> Target:
        """The target of a URL, with a key that is made so, and what serves it. Raises `ConfigError`."""
        key = remote.canonical(url, naming)
        above = key if self.upstream is None else remote.canonical(url, naming._replace(secret=self.upstream.root.id))
        return Target(url, key, remote.suffix_of_key(key), resolve, remote.local_path(url), above)

    def target_on(self, filesystem: remote.FilesystemObject, path: str) -> Target:
        """The target of a path of a filesystem object."""
        key = filesystem.key(path, self.naming)
        above = key if self.upstream is None else filesystem.key(path, self.naming._replace(secret=self.upstream.root.id))
        return Target(path, key, remote.suffix_of_key(key.rpartition("#")[0]), lambda: filesystem.remote, None, above)

    def hot_lookup(self) -> Hit:
        """See `Store.hot_lookup`: of objects, by their URLs as the caller writes them."""
        hit = self.store.hot_lookup(URLS)
        if self.realm.is_usual:
            return hit

        def hit_in_realm(url: str, max_age: int) -> memoryview | None:
            # Elsewhere in this process, and so in its memo, the same text may name what another realm fetched.
            try:
                return hit(self.target(url).key, max_age)
            except errors.ForebayError:  # the call that goes on raises it
                return None

        return hit_in_realm

    def alias(self, url: str, key: str) -> str:
        """The name by which `hot_lookup` is to find an object, or the key itself."""
        return url if self.realm.is_usual else key


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
    """The options of one call. ``since``: serve what was validated at or after this (nanoseconds of the store's clock; 1: ever;
    -1: even if it was invalidated). ``refresh``: serve only what was validated since the call began, whatever the clock says.
    ``timeout``: seconds to wait for another process. ``bypass``: neither look into the cache nor write to it. ``force``: keep a local
    file in the cache too. ``wait``: how long its requests may wait for connections, all of one call together; None: without a limit.
    ``listed``: how a listing that this call requested describes the object. ``ahead``: the bytes are for later calls. ``life``: of the
    entry, unless ``pin``."""

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
        cls, origin: Origin, *, on_progress: Callable[[int, int | None], None] | None = None, max_age: float | str | None = None,
        refresh: bool = False, filesystem: Any = None, sha256: str | None = None, etag: str | None = None, timeout: float | None = None,
        bypass: bool = False, force: bool = False, pin: bool = False, offline: bool | None = None, on_wait: OnWait | None = None,
    ) -> Self:  # fmt: skip
        """The options of a call that begins now, with the defaults of the cache; ``filesystem`` is that of the target. See `ReadOptions`.

        Raises `ConfigError`."""
        offline = origin.offline if offline is None else offline
        age = origin.max_age if max_age is None else _config.parse_age(max_age, name="max_age") * 1_000_000_000
        now = origin.store.now(exact=refresh)
        since = -1 if offline else now if refresh else 1 if age >= FOREVER else max(1, now - int(age))
        sha256 = None if sha256 is None else _config.parse_sha256(sha256)
        timeout = origin.timeout if timeout is None else _config.parse_timeout(timeout)
        wait = None if timeout is None else waits.SharedLimit(timeout)
        return cls(since, offline, sha256, etag, timeout, bypass, force, pin, on_wait, on_progress, refresh and not offline, wait)


def first_touch(origin: Origin, url: str | os.PathLike[str], *, force: bool) -> memoryview | None:
    """The bytes of an object that was validated at most ``origin.max_age`` nanoseconds ago, if the index of keys leads to them: a hit of a
    process that has not met the object, without a `Target`, a time limit or a lease. None: the long way tells. Raises `ConfigError`."""
    text = url if type(url) is str else urls.as_text(url)
    for key in _possible_keys(origin, text, force=force):
        data = origin.store.first_touch(URLS, key, origin.max_age, origin.alias(text, key))
        if data is not None:
            return data
    return None


def is_there(origin: Origin, url: str | os.PathLike[str]) -> bool:
    """Whether `first_touch` would find an object. It is touched, so that colder ones are evicted first. Raises `ConfigError`."""
    store = origin.store
    if not store.keeps:
        return False
    with contextlib.suppress(errors.CacheFault):
        keys = _possible_keys(origin, urls.as_text(url), force=False)
        return any(store.prefetching.expect(URLS, key, origin.max_age) is not None for key in keys)
    return False


def _possible_keys(origin: Origin, text: str, *, force: bool) -> Iterator[str]:
    """The keys under which the cache may have a URL. Raises `ConfigError`."""
    if origin.closed or not text:
        return
    # A key of this space has a `#`, or is what `canonical` returned, which is its own key: such a text need not be looked at more closely,
    # unless the realm makes another key of it.
    is_likely_key = text.startswith(_REMOTE) and "#" not in text and not origin.realm(text.partition(":")[0])
    if is_likely_key:
        yield text
    key = urls.canonical(text, origin.naming) if origin.realm.is_usual else origin.target(text).key  # which `hot_lookup` has made
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
    with open(content, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(key: str) -> str:
    """The key of a directory, from the key of an object of the same name."""
    head, mark, tail = key.partition("?") if "?" in key else key.partition("#")
    return head.rstrip("/") + "/" + mark + tail
