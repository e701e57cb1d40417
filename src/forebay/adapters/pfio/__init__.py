"""Caches with the names and calls of ``pfio.cache``: change the import, and what was ``pfio.cache`` is Forebay.

Data lie in a `Samples` array: of the node's cache, or with ``dir=`` of a root of its own in that directory.
What was preserved with ``dir=`` is a file of PFIO's own format, which both packages read.
"""

from __future__ import annotations

import io
import os
from typing import Any

from forebay import errors
from forebay.adapters.pfio import places as places
from forebay.adapters.pfio.base import Cache as Cache
from forebay.adapters.pfio.base import Stored, checked_length, let_go, receive, send
from forebay.adapters.pfio.file import PfioFile
from forebay.adapters.pfio.filling import Filling
from forebay.adapters.pfio.http import HTTPCache as HTTPCache
from forebay.adapters.pfio.http import HTTPConnector as HTTPConnector
from forebay.adapters.pfio.importing import import_pfio as import_pfio

__all__ = ["Cache", "FileCache", "HTTPCache", "HTTPConnector", "MultiprocessFileCache", "NaiveCache", "ReadOnlyFileCache", "import_pfio"]


class NaiveCache(Cache):
    """A cache in the memory of one process. Objects are kept as they are, whatever ``do_pickle`` says; negative indices count from the
    end, as in a list. Callable from any thread, whatever ``multithread_safe`` says, which is only given back."""

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
        slot, mine = self._slot(i), (data,)
        if data is None:
            return slot not in self._slots  # an empty slot stays one
        return self._slots.setdefault(slot, mine) is mine

    def get(self, i: int) -> Any:
        found = self._slots.get(self._slot(i))
        return None if found is None else found[0]

    def _slot(self, i: int) -> int:
        return range(self.length)[i]


class ReadOnlyFileCache(Stored):
    """A cache of which every slot was filled, and preserved. Empty and ``closed`` before `preload`.

    Callable from any thread, usable in both processes after a fork, and picklable."""

    _tag = "readonlyfile"
    get = Stored._get  # it records nothing

    def __init__(
        self, length: int, do_pickle: bool = False, dir: str | os.PathLike[str] | None = None, verbose: bool = False
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, verbose, trace=False)
        self.closed = True
        if os.path.exists(self._place):
            places.check_local(self._place)

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
        """Read what was preserved under this name from now on; False if there is none. Raises RuntimeError where slots are empty or
        damaged, `ConfigError` where there are fewer slots."""
        try:
            found = self._find(name)
        except errors.Damaged as error:
            raise RuntimeError(str(error)) from error
        if found is None:
            return False
        lacking = found.incomplete() if isinstance(found, PfioFile) else next((i for i in range(self.length) if i not in found), None)
        if lacking is not None:
            raise RuntimeError(f"{name!r} is incomplete: slot {lacking} is empty or damaged; a FileCache can preload it")
        before, self._source, self.closed = self._source, found, False
        let_go(before)
        return True

    def close(self) -> None:
        """Let go of what was preloaded."""
        self.closed = True
        let_go(self._source)
        self._source = None
        self._leave_node()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_home": None, "_source": send(self._source)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._source = receive(self, state["_source"])


class FileCache(Filling):
    """Slots for one process, in files. Callable from any thread, whatever ``multithread_safe`` says, which is only given back.

    ``length``: slots. ``do_pickle``: any object instead of bytes. ``dir``: a local directory in which what this cache has lies, and
    what it preserves; None: the node's cache. ``cache_size_limit``: bytes, 16 a slot included; the first put that does not fit freezes
    the cache; None and 0: no limit. ``verbose``: say what happens, through the logger ``forebay.pfio`` (INFO).
    ``trace``: record calls in the profile of pytorch-pfn-extras. Raises ValueError for what makes no sense."""

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


class MultiprocessFileCache(Filling):
    """Slots that several processes fill and read: hand it to them by fork or by pickle. See `FileCache`.

    `preserve` and `preload` only in the process that made it, before or after the others have it; only there `close` closes."""

    _tag, _limit_first, _for_workers = "multiprocessfile", False, True

    def __init__(
        self, length: int, do_pickle: bool = False, dir: str | os.PathLike[str] | None = None, cache_size_limit: Any = None,
        verbose: bool = False, trace: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, cache_size_limit, verbose, trace)
