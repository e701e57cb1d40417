"""`SharedBarrier`, over a barrier of a claim: who waits sleeps in the kernel, and is told when a process dies that it waits for."""

from __future__ import annotations

import operator
import os
import threading
from collections import Counter
from typing import Any, Self

import numpy as np

from forebay import claims
from forebay.adapters.streaming.prefix import claim_of, hold
from forebay.adapters.streaming.shared import SharedArray
from forebay.claims.conflicts import ClaimRequest
from forebay.claims.registry import Registry
from forebay.claims.shared import NamedLock
from forebay.world import World


class SharedBarrier:
    """A barrier for all processes of the node that make one of this name, get it by pickle, or are forked with it: call it with how many
    there are.

    It belongs to the claim with whose number the name begins, if this process has that, else to one of its own. ``num_enter``,
    ``num_exit`` and ``flag`` are Streaming's, of a barrier where nobody waits; ``_arr`` is the memory where they are. ``lock`` is a lock
    of the same processes, with the calls of a FileLock; it is not needed, so it can be deleted, and is not pickled. ``filelock_path`` is
    only kept."""

    lock: Any  # Streaming puts a FileLock here

    def __init__(self, filelock_path: str, shm_name: str) -> None:
        """Raises what `SharedMemory` raises."""
        self.filelock_path = filelock_path
        self._arr = SharedArray(3, np.int32, shm_name)
        self.num_enter, self.num_exit, self.flag = 0, -1, True
        self._claim = claim_of(shm_name) or _of_its_own(shm_name)
        hold(self, self._claim)
        self.lock = Lock(self._claim.lock(shm_name), filelock_path)

    @property
    def num_enter(self) -> int:
        return int(self._arr[0])

    @num_enter.setter
    def num_enter(self, value: int) -> None:
        self._arr[0] = value

    @property
    def num_exit(self) -> int:
        return int(self._arr[1])

    @num_exit.setter
    def num_exit(self, value: int) -> None:
        self._arr[1] = value

    @property
    def flag(self) -> bool:
        return bool(self._arr[2])

    @flag.setter
    def flag(self, value: bool) -> None:
        self._arr[2] = bool(value)

    def __call__(self, num_procs: int) -> None:
        """Wait until ``num_procs`` processes have come. Raises `BarrierBroken` where one of them died."""
        self._claim.barrier(self._arr.name).wait(operator.index(num_procs))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        hold(self, self._claim)


class Lock:
    """A lock of a claim, with the calls of ``filelock.FileLock``: a thread that has it may take it again, and lets it go as often.

    ``lock_file`` is only kept. A forked child does not hold what its parent holds."""

    def __init__(self, lock: NamedLock, lock_file: str) -> None:
        self.lock_file, self._lock = lock_file, lock
        self._depth: Counter[tuple[int, int]] = Counter()  # by process and thread

    def acquire(self, timeout: float | None = None, *_: Any, blocking: bool = True, **__: Any) -> Self:
        """Take it, for a `with` or until `release`. ``timeout``: in seconds, for ever if negative. Raises `WaitTimeout`."""
        me = os.getpid(), threading.get_ident()
        if not self._depth[me]:
            patience = None if timeout is None or timeout < 0 else timeout
            self._lock.within(patience if blocking else 0.0).__enter__()
        self._depth[me] += 1
        return self

    def release(self, force: bool = False) -> None:
        """Let it go; nothing happens where this thread does not have it. ``force``: however often it was taken."""
        me = os.getpid(), threading.get_ident()
        depth = self._depth.pop(me, 0)
        if depth > 1 and not force:
            self._depth[me] = depth - 1
        elif depth:
            self._lock.__exit__(None, None, None)

    @property
    def is_locked(self) -> bool:
        """Whether this thread has it."""
        return self._depth[os.getpid(), threading.get_ident()] > 0

    def __enter__(self) -> Self:
        return self.acquire(timeout=self._lock.timeout)

    def __exit__(self, *_: object) -> None:
        self.release()


_own: dict[str, claims.Claim] = {}  # of this process


def _of_its_own(name: str) -> claims.Claim:
    """The claim that all processes of this user have for a barrier of this name; whoever comes first makes it."""
    found = _own.get(name)
    if found is None or found.closed:
        registry = Registry()
        held = registry.join_or_register(ClaimRequest("barriers of Streaming", "their names", name, (), name="all who have this barrier"))
        _own[name] = found = claims.opened(registry, held, World(1, 1, 1, 0))
    return found
