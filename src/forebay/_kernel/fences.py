"""The order in which other processes see what this one stores to shared words.

Cores of x86-64 store in the order of the program, and load in it. Others, such as those of aarch64, keep neither order: a process may see
the last of two stores first. There, `fence` has the kernel run a full barrier on each core that runs a process of Forebay (``membarrier``,
since Linux 4.16). So only a process that stores pays, about a microsecond; what only loads needs no barrier."""

from __future__ import annotations

import ctypes
import functools
import os

from forebay._logs import logger

log = logger("forebay.kernel")

_MACHINE = os.uname().machine
_IS_ORDERED = _MACHINE == "x86_64"
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365, "s390x": 356}.get(_MACHINE, -1)
_GLOBAL_EXPEDITED, _REGISTER = 2, 4
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype, _syscall.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int]


def fence() -> None:
    """Let no process that has joined see a later store of this one without the earlier ones. And if one has loaded something before this
    call that was stored after it, what it loads next is at least as new."""
    if not _IS_ORDERED:
        _membarrier(_GLOBAL_EXPEDITED)


def join() -> None:
    """Have the fences of other processes count for this one, and for the children that it forks."""
    if not _IS_ORDERED:
        _register()


@functools.cache
def _register() -> None:
    if not _membarrier(_REGISTER):
        log.warning(
            "no membarrier (%s): on %s, this process may see what others store to shared memory out of order; let one process use a cache",
            os.strerror(ctypes.get_errno()), _MACHINE,
        )  # fmt: skip


def _membarrier(command: int) -> bool:
    return bool(_syscall(_MEMBARRIER, command, 0, 0) == 0)
