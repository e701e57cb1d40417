"""Caches with the interface of ``pfio.cache``: change the import to use Forebay instead.

Data is stored in a `Samples` array: of the node's cache, or with ``dir=`` of a private root in that directory.
With ``dir=``, ``preserve`` writes a file in PFIO's own format, which both packages read.
"""

from __future__ import annotations

import errno
import io
import os
from typing import Any

from forebay import errors
from forebay._kernel.interrupts import guarded_methods, paced
from forebay.adapters.pfio.base import Cache as Cache
from forebay.adapters.pfio.base import Filling, Stored, check_local, checked_length, close_source
from forebay.adapters.pfio.file import PfioFile
from forebay.adapters.pfio.file import import_pfio as import_pfio
from forebay.adapters.pfio.http import HTTPCache as HTTPCache
from forebay.adapters.pfio.http import HTTPConnector as HTTPConnector
from forebay.remote import as_text

__all__ = ["Cache", "FileCache", "HTTPCache", "HTTPConnector", "MultiprocessFileCache", "NaiveCache", "ReadOnlyFileCache", "import_pfio"]


class NaiveCache(Cache):
    """A cache in the memory of one process. Objects are kept as they are, whatever ``do_pickle`` is; negative indices count from the
    end, as in a list. Callable from any thread; ``multithread_safe`` only sets the property."""

    def __init__(self, length: int, multithread_safe: bool = False, do_pickle: bool = False) -> None:
        self.length, self.do_pickle, self._multithread_safe = checked_length(length), do_pickle, multithread_safe
        self._slots: dict[int, tuple[Any]] = {}

    def __len__(self) -> int:
        return self.length

    @property
    def multiprocess_safe(self) -> bool:
        return False

    @property
    def multithread_safe(self) -> bool:
        return self._multithread_safe

    def put(self, i: int, data: Any) -> bool:
        slot, entry = self._slot(i), (data,)
        if data is None:
            return slot not in self._slots  # None leaves an empty slot empty
        return self._slots.setdefault(slot, entry) is entry

    def get(self, i: int) -> Any:
        entry = self._slots.get(self._slot(i))
        return None if entry is None else entry[0]

    def _slot(self, i: int) -> int:
        return range(self.length)[i]


@guarded_methods("get")
class ReadOnlyFileCache(Stored):
    """A read-only cache of preserved data, of which every slot is filled. Empty and ``closed`` before `preload`.

    Callable from any thread, usable in both processes after a fork, and picklable."""

    _tag = "readonlyfile"
    get = Stored._get  # it is never traced

    def __init__(
        self, length: int, do_pickle: bool = False, dir: str | os.PathLike[str] | None = None, verbose: bool = False
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, verbose, trace=False)
        self.closed = True
        if os.path.exists(self._directory):
            check_local(self._directory)

    @property
    def frozen(self) -> bool:
        return True

    def put(self, i: int, data: Any) -> bool:
        """Raises `io.UnsupportedOperation`."""
        raise io.UnsupportedOperation("this cache is read-only: put into a FileCache or a MultiprocessFileCache")

    def preserve(self, name: str, overwrite: bool = False) -> bool:
        """Raises `io.UnsupportedOperation`."""
        raise io.UnsupportedOperation("this cache is read-only: what it reads is preserved already")

    def preload(self, name: str) -> bool:
        """From now on, read what was preserved under this name; always True. Raises FileNotFoundError if there is nothing, RuntimeError if
        slots are empty or damaged, `ConfigError` if there are fewer slots."""
        try:
            preserved = self._find(name)
        except errors.Damaged as error:
            raise RuntimeError(str(error)) from error
        if preserved is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(self._directory, as_text(name)))
        if isinstance(preserved, PfioFile):
            missing = preserved.incomplete()
        else:
            missing = next((i for i in paced(range(self.length)) if i not in preserved), None)
        if missing is not None:
            raise RuntimeError(f"{name!r} is incomplete: slot {missing} is empty or damaged; a FileCache can preload it")
        previous, self._source, self.closed = self._source, preserved, False
        close_source(previous)
        return True

    def close(self) -> None:
        """Release what was preloaded."""
        self.closed = True
        close_source(self._source)
        self._source = None
        self._close_node_cache()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._adopt(self._source)


@guarded_methods("multiprocess_safe", "multithread_safe")
class FileCache(Filling):
    """Slots for one process, in files. Callable from any thread; ``multithread_safe`` only sets the property.

    ``length``: the number of slots. ``do_pickle``: store any object instead of bytes. ``dir``: a local directory for the data and what is
    preserved; None: the node's cache. ``cache_size_limit``: bytes, including 16 a slot; the first put that does not fit freezes
    the cache; None and 0: no limit. ``verbose``: log events through the logger ``forebay.pfio`` (INFO).
    ``trace``: record calls in the profile of pytorch-pfn-extras. Raises ValueError for invalid arguments."""

    _tag, _limit_first, _for_workers = "file", True, False

    def __init__(
        self, length: int, multithread_safe: bool = False, do_pickle: bool = False, dir: str | os.PathLike[str] | None = None,
        cache_size_limit: Any = None, verbose: bool = False, trace: bool = False,
    ) -> None:  # fmt: skip
        self._multithread_safe = multithread_safe
        super().__init__(length, do_pickle, dir, cache_size_limit, verbose, trace)

    @property
    def multiprocess_safe(self) -> bool:
        return self.frozen

    @property
    def multithread_safe(self) -> bool:
        return self._multithread_safe


@guarded_methods()
class MultiprocessFileCache(Filling):
    """Slots that several processes fill and read: pass it to them by fork or by pickle. See `FileCache`.

    Only the process that created it can `preserve`, `preload` and `close`, before or after other processes have it."""

    _tag, _limit_first, _for_workers = "multiprocessfile", False, True

    def __init__(
        self, length: int, do_pickle: bool = False, dir: str | os.PathLike[str] | None = None, cache_size_limit: Any = None,
        verbose: bool = False, trace: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, cache_size_limit, verbose, trace)
