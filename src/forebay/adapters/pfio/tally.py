"""How many bytes all processes together have put into an array: exact, for a cache with a limit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from forebay._engine.packs.pack import Pack
from forebay.samples import Samples

_NUMBER = struct.Struct("Q")
_PLACE = 4096 - _NUMBER.size  # the end of the index's header, where no word of the array's own is


class Tally:
    """A number in the index of an array. Callable from any thread, usable in both processes after a fork, and picklable.

    A process that is killed between counting and storing leaves the number too high, by one value; never too low."""

    _mutex: threading.Lock  # guards _fd, and the file's lock: threads of a process share that
    _fd: int

    def __init__(self, path: str) -> None:
        self._path = path
        self._begin()

    @classmethod
    def of(cls, samples: Samples) -> Tally | None:
        """The number of this array, 0 at first; None for an array that keeps nothing."""
        pack = samples._pack
        return cls(str(pack._root.pack(pack.id) / "index")) if isinstance(pack, Pack) else None

    def _begin(self) -> None:
        self._mutex, self._fd, self._pid = threading.Lock(), -1, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (self._path,)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else counts meanwhile, of any process. Raises OSError where the array is gone."""
        if self._pid != os.getpid():
            self.close()  # it is the parent's too, whose lock would let us pass
            self._begin()
        with self._mutex:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self) -> int:
        """The number. Within `alone`."""
        number: int = _NUMBER.unpack(os.pread(self._fd, _NUMBER.size, _PLACE))[0]
        return number

    def add(self, size: int) -> None:
        """Count ``size`` more. Within `alone`."""
        os.pwrite(self._fd, _NUMBER.pack(self.read() + size), _PLACE)

    def close(self) -> None:
        """Let go of the file. It is opened again where it is needed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()
