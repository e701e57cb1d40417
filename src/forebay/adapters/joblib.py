"""joblib: results of ``joblib.Memory`` in a Forebay root, within its budget.

``register()`` once, then ``joblib.Memory("/nvme/forebay", backend="forebay")``.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from forebay import errors
from forebay._kernel.interrupts import guarded_methods
from forebay._model import Entry
from forebay.cache import Cache

try:
    import joblib
    from joblib._store_backends import CacheItemInfo, CacheWarning, StoreBackendBase, StoreBackendMixin
    from joblib.logger import format_time
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.joblib", "joblib") from error

__all__ = ["StoreBackend", "register"]

SPACE = "joblib"
OUTPUT, METADATA, CODE = "output", "metadata", "code"
_last_unstored = threading.local()
"""``call``: store, key and output of the last call of this thread that could not be stored."""


def register() -> None:
    """Let ``joblib.Memory(..., backend="forebay")`` find `StoreBackend`. Idempotent."""
    joblib.register_store_backend("forebay", StoreBackend)


@guarded_methods()
class StoreBackend(StoreBackendMixin, StoreBackendBase):  # type: ignore[misc]  # joblib is optional: to mypy it is Any
    """A store of ``joblib.Memory`` in a Forebay root. Created by joblib; ``cache`` is the open `Cache`.

    ``location``: the root; if it is a str, without the ``joblib`` that joblib appends. ``backend_options``: ``cache``, an open `Cache` to
    use instead of the location; ``space``, the name of the part of the cache that holds the results (``joblib``); ``quota``, its maximum
    bytes; ``codec``, as for `Cache.tasks`; all others are arguments of `Cache`, such as ``budget``. ``mmap_mode``: with None, arrays are
    private copies; with ``"r"`` read-only views of the cached file; with ``"c"`` private memory that is copied on write. ``"r+"``, ``"w+"``
    and ``compress`` raise `ConfigError` (a ValueError). Raises what opening a `Cache` raises.

    Callable from any thread, usable in both processes after a fork, and picklable: it is the same store in another process. A result is
    visible completely or not at all. A result that cannot be stored is still returned, with a warning."""

    cache: Cache

    def configure(self, location: str, verbose: int = 1, backend_options: dict[str, Any] | None = None) -> None:
        """Open the root. See the class."""
        options = dict(backend_options or {})
        self.mmap_mode, self.verbose, self.compress = options.pop("mmap_mode", None), verbose, options.pop("compress", False)
        if self.mmap_mode not in (None, "r", "c"):
            message = f"mmap_mode={self.mmap_mode!r} would write to the cached results of all processes: choose 'r', 'c' or None"
            raise errors.ConfigError(message, name="mmap_mode", value=repr(self.mmap_mode))
        if self.compress:
            message = "Forebay does not compress results, so that they can be mapped: leave compress= out"
            raise errors.ConfigError(message, name="compress", value=repr(self.compress))
        self.location, self.space = location, options.pop("space", SPACE)
        quota, codec, cache = options.pop("quota", None), options.pop("codec", None), options.pop("cache", None)
        if cache is not None and options:
            message = f"backend_options has an open cache, and {', '.join(options)}, which only opening one can use"
            raise errors.ConfigError(message, name="backend_options", value=repr(options))
        path = Path(location)
        self.cache = cache or Cache(path.parent if path.name == "joblib" else path, **options)
        self._tasks = self.cache.tasks(self.space, budget=quota, codec=codec, copy=self.mmap_mode != "r")

    # -- results ---------------------------------------------------------------------------------------------------

    def load_item(
        self, call_id: Sequence[str], verbose: int = 1, timestamp: float | None = None, metadata: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        """The result of a call. Raises KeyError if there is none."""
        if verbose > 1:
            since = f"{format_time(time.time() - timestamp): <16}" if timestamp is not None else ""
            arguments = (metadata or {}).get("input_args")
            given = "" if arguments is None else f"({', '.join(f'{name}={value}' for name, value in arguments.items())})"
            where = "..." if verbose < 10 else f" from {self._shown(call_id)}"
            _say(f"[Memory]{since}: Loading {Path(call_id[0]).name}{given}{where}")
        key = _key(*call_id, OUTPUT)
        hit, value = self._tasks.read(key)
        if hit:
            return value
        store, unstored, output = getattr(_last_unstored, "call", (None, "", None))
        if store is not self or unstored != key:
            raise KeyError(f"{self._shown(call_id)} is not in the cache: it was cleared or evicted")
        del _last_unstored.call
        return output

    def dump_item(self, call_id: Sequence[str], item: Any, verbose: int = 1) -> None:
        """Store the result of a call. Warns if that is impossible."""
        if verbose > 10:
            _say(f"Persisting in {self._shown(call_id)}")
        key, is_stored = _key(*call_id, OUTPUT), False
        try:
            is_stored = self._tasks.write(key, item)
        except errors.ConfigError as error:
            warnings.warn(f"Unable to cache to disk: {error}", CacheWarning, stacklevel=2)
        # With an mmap_mode, joblib reads each result back, and an output that has no room must not become a KeyError of the call.
        if not is_stored and self.mmap_mode is not None:
            _last_unstored.call = self, key, item

    def contains_item(self, call_id: Sequence[str]) -> bool:
        """Whether there is a result of this call."""
        return self._tasks.has(_key(*call_id, OUTPUT))

    def clear_item(self, call_id: Sequence[str]) -> None:
        """Remove the result of a call."""
        self.clear_location(_key(*call_id))

    def store_metadata(self, call_id: Sequence[str], metadata: dict[str, Any]) -> None:
        """Store duration and arguments of a call."""
        self._tasks.write(_key(*call_id, METADATA), metadata)

    def get_metadata(self, call_id: Sequence[str]) -> dict[str, Any]:
        """What `store_metadata` stored; empty if there is nothing."""
        hit, metadata = self._tasks.read(_key(*call_id, METADATA))
        return metadata if hit else {}

    def get_item_info(self, call_id: Sequence[str]) -> dict[str, str]:
        """Where joblib expects a result."""
        return {"location": self._shown(call_id)}

    # -- functions -------------------------------------------------------------------------------------------------

    def store_cached_func_code(self, call_id: Sequence[str], func_code: str | None = None) -> None:
        """Store the source of a function, by which joblib detects a change."""
        if func_code is not None:
            # Pinned: joblib takes a function whose source is gone for a changed one, and would compute all again.
            self._tasks.write(_key(*call_id, CODE), func_code, pin=True)

    def get_cached_func_code(self, call_id: Sequence[str]) -> str:
        """The source of a function. Raises FileNotFoundError if there is none."""
        hit, code = self._tasks.read(_key(*call_id, CODE))
        if not hit:
            raise FileNotFoundError(f"the code of {_key(*call_id)} is not in the cache")
        return str(code)

    def get_cached_func_info(self, call_id: Sequence[str]) -> dict[str, str]:
        """Where joblib expects the results of a function."""
        return {"location": self._shown(call_id)}

    def contains_path(self, call_id: Sequence[str]) -> bool:
        """Whether the source of a function is stored."""
        return self._tasks.has(_key(*call_id, CODE))

    def clear_path(self, call_id: Sequence[str]) -> None:
        """Remove all results of a function, and its source. Raises `WriterBusy`."""
        prefix = f"{_key(*call_id)}/"
        self._remove(lambda entry: entry.key.startswith(prefix))

    # -- the whole store -------------------------------------------------------------------------------------------

    def get_items(self) -> list[CacheItemInfo]:
        """Each stored call with its size, and when its result was last used."""
        sizes: dict[str, int] = {}
        used: dict[str, float] = {}
        for entry in self.cache.entries(self.space):
            path, _, part = entry.key.rpartition("/")
            if part != CODE:
                sizes[path] = sizes.get(path, 0) + entry.size
                if part == OUTPUT or path not in used:  # a look at the metadata is no use of the result
                    used[path] = entry.used
        return [CacheItemInfo(path, size, datetime.fromtimestamp(used[path])) for path, size in sizes.items()]

    def clear_location(self, location: str) -> None:
        """Remove a call, by its path in `get_items`."""
        for part in (OUTPUT, METADATA):
            self._tasks.evict(f"{location}/{part}")

    def clear(self) -> None:
        """Remove everything. Raises `WriterBusy`."""
        self._remove(lambda entry: True)

    def _remove(self, where: Callable[[Entry], bool]) -> None:
        pinned = [entry.key for entry in self.cache.entries(self.space) if entry.life == "pinned" and where(entry)]
        self.cache.plan(space=self.space, where=where).execute()
        for key in pinned:
            self._tasks.evict(key)

    def create_location(self, location: str) -> None:
        """Nothing: keys need no directories."""

    def _shown(self, call_id: Sequence[str]) -> str:
        return str(Path(self.location, *call_id))

    def _open_item(self, f: Any, mode: str) -> NoReturn:
        raise NotImplementedError("results are not files")

    def _item_exists(self, location: str) -> NoReturn:
        raise NotImplementedError("results are not files")

    def _move_item(self, src: str, dst: str) -> NoReturn:
        raise NotImplementedError("results are not files")


def _say(line: str) -> None:
    """Print what joblib's ``verbose`` asks for, where joblib prints it."""
    sys.stdout.write(f"{line}\n")


def _key(*parts: str) -> str:
    return "/".join(parts).encode("utf-8", "backslashreplace").decode()  # a file name may not be valid Unicode
