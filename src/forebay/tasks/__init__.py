"""Outputs of expensive calls, stored by tag."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from forebay import errors
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay._logs import logger
from forebay._model import check_free, exact_str, is_text
from forebay.codecs import Codec, default_codec
from forebay.codecs import codec as codec_of
from forebay.fetch import Fetcher
from forebay.tasks.config import Bypass, load, reads_cache
from forebay.tasks.values import CacheInfo as CacheInfo
from forebay.tasks.values import Values

if TYPE_CHECKING:
    from forebay.tasks.cached import Cached, Decorator

log = logger("forebay.tasks")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TaskStats:
    """What a `Tasks` holds, and what this process did with this object. Returned by `Tasks.stats`. `Cache.stats` counts for the whole node.

    ``entries``: number of its values. ``bytes``: their stored size. ``budget``: bytes that they may have; None: limited by the cache only.
    ``hits``: reads that returned a value. ``misses``: reads that returned none. ``runs``: calls that ran. ``replays``: calls that were
    replayed instead. ``waits``: values that another process or thread computed while this one waited. ``store_failures``: values that could
    not be stored. ``damaged``: stored values that could not be read."""

    entries: int
    bytes: int
    budget: int | None
    hits: int
    misses: int
    runs: int
    replays: int
    waits: int
    store_failures: int
    damaged: int


@guarded_methods("from_cache", "if_cached", "set_provider", "set_condition")
class Tasks:
    """Values by tag, and functions whose outputs are stored. Made by `Cache.tasks`.

    Callable from any thread, and usable in both processes after a fork. Unpickled in another process, it is the same store, with the same
    configuration and providers. A value that was read stays usable after its eviction. Faults of the cache never reach the caller."""

    _copy = False

    def __init__(self, values: Values, bypass: Bypass, copy: bool = False) -> None:
        self.name = values.space
        self._values, self._copy = values, copy
        self._bypass: Any = bypass  # of other kinds of `Tasks`, a property

    def __reduce__(self) -> tuple[Any, ...]:
        values = self._values
        return _unpickle, (*values.fetcher.init_args, self.name, values.codec, self._bypass, self._copy)

    def __forebay_content__(self) -> str:
        """As an argument it counts by its name: where a value is stored does not change what a function returns."""
        return self.name

    def __repr__(self) -> str:
        return f"<forebay.Tasks {self.name!r} in {str(self._values.fetcher.path)!r}>"

    # -- values ----------------------------------------------------------------------------------------------------

    def write(self, tag: str, value: Any, *, pin: bool = False) -> bool:
        """Store a value under a tag, replacing any earlier one in one step. ``pin``: never evict the value.

        Returns False, with one warning, if the value cannot be stored: it is larger than the budget (then nothing is evicted for it), there
        is no room, or it cannot be pickled. The previous value then stays. Raises `ConfigError` if the codec rejects the value."""
        return self._values.keep(_key(tag), value, pin=pin)

    def read(self, tag: str, *, copy: bool | None = None) -> tuple[bool, Any]:
        """``(True, value)``, or ``(False, None)`` if there is none: one step, so that no eviction comes in between.

        Arrays are read-only views of the mapping, and stay usable after an eviction. ``tag`` may be what ``fn.tag_of()`` returns. ``copy``:
        return a private, writable copy instead (default: as set when the handle was created)."""
        hit = self._values.look(_key(tag), copy=self._copy if copy is None else copy)
        return (True, hit[0]) if hit is not None else (False, None)

    def has(self, tag: str) -> bool:
        """Whether there is a value under this tag. This does not count as a use, and the value may be gone a moment later: see `read`."""
        return self._values.has(_key(tag))

    def evict(self, tag: str) -> bool:
        """Remove a value, pinned or not. Returns False if there is none."""
        return self._values.evict(_key(tag))

    def flush(self) -> int:
        """Remove all values except pinned ones. Returns how many were removed."""
        return self._values.flush()

    def keys(self) -> list[str]:
        """All keys, from the least to the most recently used. For a function's outputs, they are what ``fn.tag_of()`` returns. If the
        cache cannot be read, there are none, one warning says so, and `size_bytes` and ``len`` are 0."""
        return self._values.keys()

    def size_bytes(self) -> int:
        """Stored size of the values in bytes, as the budget counts it."""
        return self._values.size()[0]

    def __contains__(self, tag: object) -> bool:
        return isinstance(tag, str) and self.has(tag)

    def __len__(self) -> int:
        return self._values.size()[1]

    @property
    def budget(self) -> int | None:
        """Bytes that the values of all processes may have; None: limited by the cache only."""
        return self._values.budget()

    def stats(self) -> TaskStats:
        """What is stored now, and what this process did with this object so far."""
        size, count = self._values.size()
        return TaskStats(count, size, self.budget, **self._values.counted)

    def import_chia(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Import a directory of CHIA's cache: its tags and values, in CHIA's order of use. Returns how many were imported.

        The files are pickles, and are unpickled here: import only a directory that nobody else can write to. They are not changed. Damaged
        files, and files that are not CHIA's, are skipped with a warning each. If the values do not fit, the least recently used ones are
        evicted. ``overwrite``: replace values whose tag is in use. Raises OSError if the directory cannot be read."""
        taken = 0
        for path in _oldest_first(Path(directory)):
            loaded = _loaded(path)
            if loaded is not None and (overwrite or not self._values.has(loaded[0])):
                try:
                    taken += self._values.keep(*loaded)
                except errors.ConfigError as error:
                    log.warning("%s is not imported: %s", path, str(error))
        return taken

    @reads_cache
    def from_cache(self, tag: str | None, data_path: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """A provider, for `set_provider`: returns the value under the tag. Raises `NotCached`, with function and tag."""
        hit, value = self.read(tag) if tag is not None else (False, None)
        if not hit:
            key = getattr(tag, "key", tag)
            raise errors.NotCached(f"there is nothing to replay under the tag {tag!r}: {key!r} is not in the cache", key=key)
        return value

    def if_cached(self, tag: str | None, data_path: str | None = None, *args: Any, **kwargs: Any) -> bool:
        """A condition, for `set_condition`: whether there is a value under the tag."""
        return tag is not None and self.has(tag)

    # -- functions -------------------------------------------------------------------------------------------------

    @overload
    def cached(
        self, fn: Callable[P, R], /, *, tag: str | Callable[..., str] | None = None, version: str | int | None = None,
        ignore: tuple[str, ...] | str = (), copy: bool | None = None,
    ) -> Cached[P, R]: ...  # fmt: skip

    @overload
    def cached(self, fn: classmethod[Any, Any, Any] | staticmethod[Any, Any], /) -> Any: ...

    @overload
    def cached(
        self, fn: None = None, /, *, tag: str | Callable[..., str] | None = None, version: str | int | None = None,
        ignore: tuple[str, ...] | str = (), copy: bool | None = None,
    ) -> Decorator: ...  # fmt: skip

    def cached(
        self, fn: Any = None, /, *, tag: str | Callable[..., str] | None = None, version: str | int | None = None,
        ignore: tuple[str, ...] | str = (), copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """Decorator: the function's output is stored, and a call with the same arguments does not run it again.

        A function is identified by its name and its code. ``tag``: a format string over the arguments (``"iter-{step}"``), or a callable
        that receives them; default: a stable digest of them. ``version``: replaces the code: change it when the function changes.
        ``ignore``: parameters that do not count. ``copy``: return private, writable outputs, whether computed or stored; by default as set
        when the handle was created, where arrays are read-only views of the mapping. Raises `ConfigError`; so does a call if no tag can be
        made from its arguments or the codec does not support the output."""
        from forebay.tasks.cached import decorate

        return decorate(self, fn, tag, version, ignore, self._copy if copy is None else copy)

    def set_provider(self, name: str, provider: Callable[..., Any]) -> None:
        """Set what runs instead of the function ``name`` if the configuration replays it: ``provider(tag, data_path, *args, **kwargs)``."""
        self._bypass.set_provider(name, provider)

    def set_condition(self, name: str, cond: Callable[..., bool]) -> None:
        """Set the last check of whether a call of ``name`` is replayed: ``cond(tag, data_path, *args, **kwargs)``."""
        self._bypass.set_condition(name, cond)


def open_tasks(fetcher: Fetcher, name: str, codec: Any, config: Any, budget: int | str | None, copy: bool = False) -> Tasks:
    """See `Cache.tasks`. ``budget``: see `Spaces.ensure`."""
    check_free(name)
    chosen = codec_of(codec) if codec is not None else default_codec(others_can_write=fetcher.others_can_write)
    bypass = Bypass(None if config is None else load(config))
    fetcher.open_space(name, policy=None, quota=budget)
    values = _open[str(fetcher.path), name, chosen.name] = Values(fetcher, name, chosen)
    return Tasks(values, bypass, copy)


_open: weakref.WeakValueDictionary[tuple[str, str, str], Values] = weakref.WeakValueDictionary()
_unpickled: dict[tuple[str, str, str], Values] = {}
"""What this process has open, by root, space and codec. What was unpickled stays open: the next pickle of it finds the same object."""


@guarded
def _unpickle(root: str, init_kwargs: dict[str, Any], name: str, codec: Codec, bypass: Bypass, copy: bool) -> Tasks:
    """A handle from another process. It uses what is open here already, if that is the same."""
    key = root, name, codec.name
    values = _open.get(key)
    if values is None or values.fetcher.closed or values.fetcher.init_args != (root, init_kwargs):
        values = _open[key] = _unpickled[key] = Values(Fetcher.reopen(root, init_kwargs), name, codec)
    return Tasks(values, bypass, copy)


def _key(tag: str) -> str:
    """The key of a tag as an exact str, which a function's tag knows. Raises `ConfigError` unless the tag is a str of valid Unicode."""
    key = exact_str(getattr(tag, "key", tag))
    if key is None or not is_text(key):
        message = f"the tag {tag!r} cannot be used: a tag is a str of valid unicode"
        raise errors.ConfigError(message, name="tag", value=repr(tag))
    return key


# -- CHIA's cache ------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9._-]{0,80}_[0-9a-f]{16}\.pkl")


def _oldest_first(directory: Path) -> Iterator[Path]:
    """The files with a name of CHIA's, in order of modification: CHIA orders them by use that way. Raises OSError."""
    with os.scandir(directory) as items:
        files = [
            (item.stat().st_mtime_ns, item.path) for item in items if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False)
        ]
    return (Path(path) for _, path in sorted(files))


def _loaded(path: Path) -> tuple[str, Any] | None:
    """Tag and value of one file; None, with a warning, if it contains something else or is damaged."""
    try:
        tag, value = pickle.loads(path.read_bytes())
        slug = re.sub(r"[^A-Za-z0-9._-]", "_", tag)[:80]
        if path.name != f"{slug}_{hashlib.sha256(tag.encode()).hexdigest()[:16]}.pkl":
            raise ValueError("its name is not that of its tag")
    except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is unpickled
        log.warning("%s is not imported: %s: %s", path, type(error).__name__, str(error))
        return None
    return tag, value
