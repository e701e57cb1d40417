"""A cache of the adapter for PFIO that is filled: put, preserve, preload, and its life over several processes."""

from __future__ import annotations

import contextlib
import decimal
import numbers
import operator
import os
import pickle
import secrets
import warnings
import weakref
from typing import Any, cast

from forebay import errors
from forebay._engine.files.faults import FULL
from forebay.adapters.pfio import places as places
from forebay.adapters.pfio.base import Stored, let_go, receive, recorded, send
from forebay.adapters.pfio.file import RECORD, PfioFile
from forebay.adapters.pfio.saving import write_array
from forebay.adapters.pfio.tally import Tally
from forebay.cache import Cache as Home
from forebay.samples import Samples

_RUN = secrets.token_hex(8)  # a forked child inherits it, and has another pid; a spawned one may get the pid, and has another word


class Filling(Stored):
    """Slots that are filled here, until they are frozen."""

    _live: Samples | None  # what put fills
    _limit_first: bool  # whether a put into a filled slot, too, meets the limit
    _for_workers: bool  # whether only the process that made it can close it for all, and preload

    def __init__(
        self, length: int, do_pickle: bool, dir: str | os.PathLike[str] | None, cache_size_limit: Any, verbose: bool, trace: bool
    ) -> None:  # fmt: skip
        super().__init__(length, do_pickle, dir, verbose, trace)
        self.cache_size_limit = _limit(cache_size_limit)
        self._maker = (os.getpid(), _RUN)
        own = places.open_private(self._place) if self._given else None
        home = own or self._node()
        live = self._live = home.samples(length=self.length, codec="raw")
        self._source, self.closed, self._was_frozen = live, False, False
        self._root = str(own.path) if own is not None else None
        self._end: weakref.finalize[Any, Any] | None = weakref.finalize(self, _end, self._maker, live, own)
        self._tally = Tally.of(live) if cache_size_limit else None
        if self._tally is not None:
            with self._tally.alone():
                self._tally.add(RECORD.size * self.length)
        self._say("made a cache of %d slots in %s", self.length, home.path)

    @property
    def frozen(self) -> bool:
        """Whether nothing more is put: after `preserve`, after `preload`, or when the limit was met, by whichever process."""
        live = self._live
        return self._was_frozen if live is None else live.frozen

    def put(self, i: int, data: Any) -> bool:
        """Store the data of slot i. False if it has some, or this is frozen or closed, or the disk is full, which is told by one
        RuntimeWarning. Raises IndexError, TypeError for what is not bytes-like (unless ``do_pickle``), and what pickling raises."""
        if not self.trace:
            return self._put(i, data)
        with recorded(f"pfio.cache.{self._tag}:put"):
            return self._put(i, data)

    def _put(self, i: int, data: Any) -> bool:
        live = self._live
        if live is None or self.closed or self.frozen:
            return False
        value = pickle.dumps(data) if self.do_pickle else memoryview(data)
        try:
            return live.put(i, value) if self._tally is None else self._put_within(self._tally, live, operator.index(i), value)
        except errors.Closed:  # by another thread, meanwhile
            return False
        except OSError as error:  # what can be told of a cache is told already: this is one that somebody removed
            self._tell_once(error)
            return False

    def _put_within(self, tally: Tally, live: Samples, i: int, value: bytes | memoryview) -> bool:
        """Where the limit is met nothing is put from then on."""
        size = memoryview(value).nbytes
        with tally.alone():
            if live.frozen or not 0 <= i < self.length or (i in live and not self._limit_first):
                return live.put(i, value)
            if tally.read() + size > self.cache_size_limit:
                live.freeze()
                return False
            tally.add(size)
            stored = live.put(i, value)
            if not stored:
                tally.add(-size)
            return stored

    def preserve(self, name: str, overwrite: bool = False) -> bool:
        """Keep what is stored under a name, for `preload` of any of these classes, beyond `close`; nothing is put from then on.

        With ``dir`` it is the file ``dir/name``, which PFIO reads too; else a name in the node's cache. False if there is such a
        name already, unless ``overwrite``, or no room for it. Raises RuntimeError in any process but the one that made this cache."""
        self._check_maker("preserve")
        if self.closed:
            return False
        kept = self._save(name, overwrite) if self._given or isinstance(self._source, PfioFile) else self._name(name, overwrite)
        if not kept:
            self._say("%s is not preserved in %s", name, self.dir)
        return kept

    def _save(self, name: str, overwrite: bool) -> bool:
        target = os.path.join(self._place, name)
        if not overwrite and os.path.lexists(target):
            return False
        if isinstance(self._source, PfioFile):
            return places.link(self._source.path, target, overwrite)
        live = cast(Samples, self._source)
        live.freeze()
        staged = os.path.join(str(self._root), f"preserve-{secrets.token_hex(8)}")
        try:
            with open(staged, "xb", opener=_private) as file:
                write_array(file, live)
            return places.publish(staged, target, overwrite)
        except OSError as error:
            if error.errno not in FULL:
                raise
            warnings.warn(f"{target} is not kept: {error.strerror}", RuntimeWarning, stacklevel=3)
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)

    def _name(self, name: str, overwrite: bool) -> bool:
        """Give the array that is read a name in the node's cache; where it has one, a copy of it."""
        source = self._source
        if not isinstance(source, Samples) or source.name == name:
            return overwrite
        if source.name is None:
            return source.preserve(name, overwrite)
        with self._node().samples(length=self.length) as twin:
            copied = all(twin.put(i, cast(memoryview, source.get(i))) for i in source)
            return copied and twin.preserve(name, overwrite)

    def preload(self, name: str) -> bool:
        """Read what was preserved under this name from now on, in place of what was put here. False if there is none, or this is
        frozen. Raises `ConfigError` (a ValueError) where that has fewer slots."""
        if self.frozen:
            self._say("%s is not preloaded: this cache is frozen", name)
            return False
        if self._for_workers:
            self._check_maker("preload")
        found = None if self.closed else self._find(name)
        if found is None:
            return False
        self._source = found
        self._drop_own(frozen=True)
        return True

    def close(self) -> None:
        """Let go. With ``dir``, what lies there of this cache is removed, by the process that made it; preserved files stay.

        For workers (`MultiprocessFileCache` in another process) nothing happens: the cache stays usable."""
        if self.closed or (self._for_workers and not self._is_maker()):
            return
        self.closed, source, self._source = True, self._source, None
        self._drop_own(frozen=self.frozen)
        let_go(source)
        self._leave_node()

    def _drop_own(self, *, frozen: bool) -> None:
        """What was put here goes; a closed array that is still referred to would keep its room on the disk."""
        live, self._live, self._was_frozen = self._live, None, frozen
        if self._end is not None:
            self._end()
        let_go(live)
        if self._tally is not None:
            self._tally.close()

    def _is_maker(self) -> bool:
        return self._maker == (os.getpid(), _RUN)

    def _check_maker(self, what: str) -> None:
        if not self._is_maker():
            raise RuntimeError(f"{what} can be called only in process {self._maker[0]}, which made this cache; this is {os.getpid()}")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_end", "_home", "_live", "_source")}
        sent = None if self.closed else send(self._source)  # by itself: where the root is gone it must not be opened
        return state | {"_sent": sent, "_is_live": self._source is self._live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent, is_live = state.pop("_sent"), state.pop("_is_live")
        vars(self).update(state)
        self._source = self._live = self._home = self._end = None
        root = self._root if is_live else None
        if sent is None or (root is not None and not os.path.exists(os.path.join(root, "FORMAT"))):
            self.closed = True  # by the process that made it, meanwhile
            return
        self._source = receive(self, sent)
        self._live = cast(Samples, self._source) if is_live else None
        if root is not None:
            # Its budget is what it was made with, whatever this process's environment says of budgets.
            places.reopen_private(root).close()


def _end(maker: tuple[int, str], live: Samples, own: Home | None) -> None:
    """What the process that made a cache does when that is closed, collected, or left open at exit. ``own``: its root in ``dir``."""
    if maker != (os.getpid(), _RUN):
        return
    if own is not None and not live.closed:
        live.freeze()  # else a worker that is putting makes again what is removed here
    live.close()
    if own is not None:
        own.close()
        places.remove_private(str(own.path))


def _limit(limit: Any) -> Any:
    """A limit that makes sense. Raises `ConfigError` (a ValueError)."""
    if limit is not None and not (isinstance(limit, (numbers.Real, decimal.Decimal)) and limit >= 0):  # type: ignore[operator]
        message = f"cache_size_limit={limit!r} makes no sense: bytes, or None or 0 for no limit"
        raise errors.ConfigError(message, name="cache_size_limit", value=repr(limit))
    return limit


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
