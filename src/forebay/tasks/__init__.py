"""Outputs of expensive calls, kept by tag."""

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
from forebay._logs import logger
from forebay.codecs import Codec, default_codec
from forebay.codecs import codec as codec_of
from forebay.origin import DIRECTORIES, LISTINGS, URLS, Origin
from forebay.tasks.config import Bypass, Config, from_cache, if_cached, load, reads_cache
from forebay.tasks.values import Values

if TYPE_CHECKING:
    from forebay.tasks.cached import Cached, Decorator

log = logger("forebay.tasks")
P = ParamSpec("P")
R = TypeVar("R")

TAKEN = (URLS, DIRECTORIES, LISTINGS, "samples", "values")
"""Names of spaces that hold something else."""


@dataclass(frozen=True, slots=True)
class TaskStats:
    """What a `Tasks` holds, and what this process did with this object.

    ``entries``, ``bytes``: of its values, as stored. ``budget``: bytes they may have; None: no more than the cache. ``hits``, ``misses``:
    reads that found something, or not. ``runs``: functions that ran; ``replays``: that were replayed instead. ``waits``: values that
    another process or thread made while this one waited. ``store_failures``: values that could not be kept. ``damaged``: stored values
    that could not be read. `Cache.stats` has the numbers of the node."""

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


class Tasks:
    """Values by tag, and functions whose outputs are kept. Made by `Cache.tasks`.

    Callable from any thread; usable in both processes after a fork; pickled to another process it is the same store, with the same
    configuration and providers. What was read stays good after an eviction. Faults of the cache never reach the caller."""

    _copy = False

    def __init__(self, values: Values, config: Config | None = None, bypass: Bypass | None = None, copy: bool = False) -> None:
        self.name = values.space
        self._values, self._copy = values, copy
        self._config: Any = config  # of other kinds of `Tasks`, properties
        self._bypass: Any = Bypass(config) if bypass is None else bypass

    def __reduce__(self) -> tuple[Any, ...]:
        values = self._values
        return _unpickle, (*values.origin.init_args, self.name, values.codec, self._config, self._bypass, self._copy)

    def __forebay_content__(self) -> str:
        """As an argument: where something is kept does not change what a function gives."""
        return self.name

    def __repr__(self) -> str:
        return f"<forebay.Tasks {self.name!r} in {str(self._values.origin.path)!r}>"

    # -- values ----------------------------------------------------------------------------------------------------

    def write(self, tag: str, value: Any, *, pin: bool = False) -> bool:
        """Keep a value under a tag, in place of what was there, in one step. ``pin``: it is never evicted.

        False, with one warning, where it cannot be kept: larger than the budget (then nothing is evicted for it), no room, not to be
        pickled; then what was there stays. Raises `ConfigError` for a value of a kind that the codec does not take."""
        return self._values.keep(_key(tag), value, pin=pin)

    def read(self, tag: str, *, copy: bool | None = None) -> tuple[bool, Any]:
        """``(True, value)``, or ``(False, None)`` where there is none: in one step, so that nothing can go in between.

        Arrays are read-only views of the mapping; they stay good after an eviction. ``copy``: of the caller's own, which may be written
        to; by default as the handle was made. ``tag``: also what ``fn.tag_of()`` gives."""
        found = self._values.look(_key(tag), copy=self._copy if copy is None else copy)
        return (True, found[0]) if found is not None else (False, None)

    def has(self, tag: str) -> bool:
        """Whether there is something under this tag. That is no use of it; it may be gone a moment later: see `read`."""
        return self._values.has(_key(tag))

    def evict(self, tag: str) -> bool:
        """Remove a tag, pinned or not. False if there is none."""
        return self._values.evict(_key(tag))

    def flush(self) -> int:
        """Remove all values but the pinned ones; gives how many went."""
        return self._values.flush()

    def keys(self) -> list[str]:
        """All keys, from the least to the most recently used. Of a function's outputs: what ``fn.tag_of()`` gives."""
        return self._values.keys()

    def size_bytes(self) -> int:
        """Bytes of the values, as stored: what the budget counts."""
        return self._values.size_bytes()

    def __contains__(self, tag: object) -> bool:
        return isinstance(tag, str) and self.has(tag)

    def __len__(self) -> int:
        return self._values.size()[1]

    @property
    def budget(self) -> int | None:
        """Bytes that the values may have, whoever writes; None: no more than the cache."""
        return self._values.budget()

    def stats(self) -> TaskStats:
        """What is there now, and what this process did with this object so far."""
        size, count = self._values.size()
        return TaskStats(count, size, self.budget, **self._values.counted)

    def _count(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of what `TaskStats` calls ``name``."""
        self._values.counted[name] += n

    def import_chia(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Take over a directory of CHIA's cache: its tags and values, those that it used last as the last used. Gives how many came.

        Its files are pickles, and are unpickled here: only import a directory that nobody else can write to. They stay as they are.
        Damaged ones and others than CHIA's are left out, with a warning each; what does not fit makes the least recently used go.
        ``overwrite``: also where there is something under the tag. Raises OSError where the directory cannot be read."""
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
    def from_cache(self, tag: str, data_path: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """A provider, for `set_provider`: what is kept under the tag. Raises `NotCached`, with function and tag."""
        return from_cache(self, tag, data_path, *args, **kwargs)

    def if_cached(self, tag: str, data_path: str | None = None, *args: Any, **kwargs: Any) -> bool:
        """A condition, for `set_condition`: whether anything is kept under the tag."""
        return if_cached(self, tag, data_path, *args, **kwargs)

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
        """A decorator: the function's output is kept, and a call with the same arguments does not run it again.

        ``tag``: a format string over the arguments (``"iter-{step}"``), a callable over them, or by default a stable digest of them.
        The function is known by its name and its code; ``version``: stands for the code: change it when the function changes. ``ignore``:
        parameters that do not count. ``copy``: outputs are the caller's own, and may be written to, whether they were computed or kept;
        by default as the handle was made: read-only where they lie over the mapping. Raises `ConfigError`; a call does, too, where no tag
        can be made, or the codec does not take the output."""
        from forebay.tasks.cached import decorate

        return decorate(self, fn, tag, version, ignore, self._copy if copy is None else copy)

    def set_provider(self, name: str, provider: Callable[..., Any]) -> None:
        """What runs in place of the function ``name`` where the configuration replays it: ``provider(tag, data_path, *args, **kwargs)``."""
        self._bypass.set_provider(name, provider)

    def set_condition(self, name: str, cond: Callable[..., bool]) -> None:
        """Whether a call of ``name`` is replayed: ``cond(tag, data_path, *args, **kwargs)``, asked last."""
        self._bypass.set_condition(name, cond)


def open_tasks(origin: Origin, name: str, codec: Any, config: Any, budget: int | None, copy: bool = False) -> Tasks:
    """See `Cache.tasks`. ``budget`` in bytes."""
    if name in TAKEN:
        raise errors.ConfigError(f"the name {name!r} is taken by the cache itself: choose another one", name="name", value=name)
    chosen = codec_of(codec) if codec is not None else default_codec(others_can_write=origin.others_can_write)
    parsed = None if config is None else load(config)
    origin.open_space(name, policy=None, quota=budget)
    values = _open[str(origin.path), name, chosen.name] = Values(origin, name, chosen)
    return Tasks(values, parsed, copy=copy)


_open: weakref.WeakValueDictionary[tuple[str, str, str], Values] = weakref.WeakValueDictionary()
_unpickled: dict[tuple[str, str, str], Values] = {}
"""What this process has open, by root, space and codec. What came by pickle alone stays open: the next that comes is the same."""


def _unpickle(
    root: str, init_kwargs: dict[str, Any], name: str, codec: Codec, config: Config | None, bypass: Bypass, copy: bool
) -> Tasks:  # fmt: skip
    """A handle that came from another process: with what is open here already, if it is the same."""
    key = root, name, codec.name
    values = _open.get(key)
    if values is None or values.origin.closed or values.origin.init_args != (root, init_kwargs):
        values = _open[key] = _unpickled[key] = Values(Origin.reopen(root, init_kwargs), name, codec)
    return Tasks(values, config, bypass, copy)


def _key(tag: str) -> str:
    """The key of a tag: its own, where it is one of a function's. Raises `ConfigError` for what is no str of valid unicode."""
    key: str = getattr(tag, "key", tag)
    try:
        key.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        message = f"the tag {tag!r} cannot be used: a tag is a str of valid unicode"
        raise errors.ConfigError(message, name="tag", value=repr(tag)) from error
    return key


# -- CHIA's cache ------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9._-]{0,80}_[0-9a-f]{16}\.pkl")


def _oldest_first(directory: Path) -> Iterator[Path]:
    """The files that have a name of CHIA's, in order of their last change: that is how it orders them by use. Raises OSError."""
    with os.scandir(directory) as found:
        files = [
            (item.stat().st_mtime_ns, item.path) for item in found if _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False)
        ]
    return (Path(path) for _, path in sorted(files))


def _loaded(path: Path) -> tuple[str, Any] | None:
    """Tag and value of one file; None, with a warning, where it holds something else or is damaged."""
    try:
        tag, value = pickle.loads(path.read_bytes())
        if _file_name(tag) != path.name:
            raise ValueError("its name is not that of its tag")
    except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is made anew
        log.warning("%s is not taken over: %s: %s", path, type(error).__name__, str(error))
        return None
    return tag, value


def _file_name(tag: str) -> str:
    """How CHIA calls the file of a tag."""
    slug = re.sub(r"[^A-Za-z0-9._-]", "_", tag)[:80]
    return f"{slug}_{hashlib.sha256(tag.encode()).hexdigest()[:16]}.pkl"
