"""What a claim tells of itself to everybody on the node: who has it, and what it takes."""

from __future__ import annotations

import functools
import json
import os
import pwd
import re
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from forebay import errors
from forebay.claims import dirs, processes
from forebay.claims.dirs import ClaimedPath

VERSION = 1
LARGEST = 1 << 24  # bytes of a record that are looked at: anybody may write one
_LONGEST_COMMAND = 500
_HEAD = struct.Struct("=8sI")  # of what kind, and how many marks of its places follow
_MAGIC = b"claim 1\n"
_PROCESS = re.compile(r"process \d+")
_USER = re.compile(r"://[^/\s@]*@")
_TAKES_VALUE = re.compile("[cmWX]")  # of the letters of Python's own options, which may stand together: -uc
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")


class ClaimedStream(NamedTuple):
    """One directory of a claim. ``remote``: where its files come from, free of secrets. ``shared``: it is only read."""

    place: ClaimedPath
    remote: str | None
    shared: bool = False


class Beside(NamedTuple):
    """What a claim has outside of its directory, to be removed with it. ``landmark``: the file that must still be ours for that, which is
    another name or a copy of the file ``landmark`` in the claim's directory. ``paths``: the other files."""

    paths: tuple[str, ...]
    landmark: str


class Record(NamedTuple):
    """``job`` as people know it, and ``how`` we do; ``key``: the name or number of the claim in it. ``pid``, ``space`` (PID namespace),
    ``ticks`` (its start), ``mounts`` (mount namespace), ``host``, ``command``: of who registered it, at ``start`` (seconds since 1970)."""

    prefix: int
    job: str
    how: str
    key: str
    uid: int
    host: str
    pid: int
    space: int
    ticks: int
    mounts: int
    start: float
    command: str
    streams: tuple[ClaimedStream, ...]
    world: dict[str, Any] | None
    beside: Beside | None = None
    version: int = VERSION

    @property
    def owner(self) -> str:
        """The job in words for people."""
        return owner(self.job)

    @property
    def user(self) -> str:
        """The user's name here; the number where it has none."""
        return user_name(self.uid)

    def dump(self) -> bytes:
        """As it is kept: marks of its places, by which others see quickly that it does not concern them, then JSON. Raises `ConfigError`
        for more than others would read."""
        told = dirs.marks(stream.place for stream in self.streams).told
        text = json.dumps(self._asdict(), separators=(",", ":"), allow_nan=False).encode()
        data = _HEAD.pack(_MAGIC, len(told)) + array("I", told).tobytes() + text
        if len(data) > LARGEST:
            raise errors.ConfigError(
                f"{len(self.streams):,} directories: what a claim tells of them takes {len(data):,} bytes, at most {LARGEST:,} are read: "
                "claim a directory above them", name="dirs", value=len(self.streams),
            )  # fmt: skip
        return data


def length_of_marks(data: bytes) -> int:
    """Up to where the marks go in what begins like this."""
    return _HEAD.size + 4 * int.from_bytes(data[_HEAD.size - 4 : _HEAD.size], sys.byteorder)


def may_meet(data: bytes, asked: frozenset[int]) -> bool:
    """Whether a place of the record could overlap with one whose marks ask. False is certain. ``data``: its beginning."""
    end = length_of_marks(data)
    if not data.startswith(_MAGIC) or len(data) < end:
        return True
    return not asked.isdisjoint(memoryview(data)[_HEAD.size : end].cast("I"))


def load(data: bytes) -> Record | None:
    """The record; None where it is damaged, or of a version that is not known."""
    try:
        magic, marks = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            return None
        found = json.loads(data[_HEAD.size + 4 * marks :])
        if found["version"] != VERSION:
            return None
        found["streams"] = tuple(_stream(*stream) for stream in found["streams"])
        if found["beside"] is not None:
            paths, landmark = found["beside"]
            found["beside"] = Beside(tuple(map(os.fspath, paths)), os.fspath(landmark))
        record = Record(**found)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return record if _is_sound(record) else None


def owner(job: str) -> str:
    """A job in words for people."""
    return f"the job of {job}" if _PROCESS.match(job) else f"job {job}"


def _stream(place: Any, remote: Any, shared: Any) -> ClaimedStream:
    path, names, levels = place
    if not (isinstance(path, str) and (remote is None or isinstance(remote, str)) and all(isinstance(name, str) for name in names)):
        raise ValueError("not a stream")
    return ClaimedStream(ClaimedPath(path, tuple(names), tuple((int(dev), int(ino)) for dev, ino in levels)), remote, bool(shared))


def _is_sound(record: Record) -> bool:
    words = (record.job, record.how, record.key, record.host, record.command)
    numbers = (record.prefix, record.uid, record.pid, record.space, record.ticks, record.mounts)
    return (
        all(type(word) is str for word in words)
        and all(type(number) is int for number in numbers)
        and isinstance(record.start, float | int)
        and (record.world is None or isinstance(record.world, dict))
    )


@functools.cache
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_command() -> str:
    """The command line of this process, without the values of its arguments: anybody may read it."""
    return _command_of(os.getpid())


@functools.lru_cache(1)
def _command_of(pid: int) -> str:
    try:
        words = processes.read(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        return ""
    return shortened(masked(words), _LONGEST_COMMAND)


def shortened(text: str, longest: int) -> str:
    """A text without its middle where it is too long: of a command, its program and its last arguments tell the most."""
    head, tail = longest // 2, longest - longest // 2 - 3
    return text if len(text) <= longest else f"{text[:head]}...{text[-tail:]}"


def masked(words: list[str]) -> str:
    """A command line that everybody may read: program, script or module, and the names of options. No value is shown, whatever its name:
    ``-p hush`` is a secret as well as ``--token=hush``."""
    program, left = os.path.basename(words[0]) if words else "", iter(words[1:])
    shown = [program]
    if program.startswith(("python", "pypy")):
        shown += _up_to_script(left)
    for word in left:
        if word.startswith("--"):
            name, sign, _ = word.partition("=")
            shown.append(f"{name}=*" if sign else name)
        elif word.startswith("-") and word[1:2].isalpha():
            shown.append(word[:2] if len(word) == 2 else f"{word[:2]}*")
        elif word and shown[-1] != "*":
            shown.append("*")
    return _QUERY.sub(r"\1", _USER.sub("://", " ".join(" ".join(shown).split())))


def _up_to_script(words: Iterator[str]) -> list[str]:
    """The interpreter's own options, without their values, and the script or module. Takes all of that from ``words``."""
    shown: list[str] = []
    for word in words:
        if not word.startswith("-") or word == "-":
            return [*shown, word]
        letter = _TAKES_VALUE.search(word) if not word.startswith("--") else None
        if letter is None:
            name, sign, _ = word.partition("=")
            shown.append(f"{name}=*" if sign else name)
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        option, value = word[: letter.end()], word[letter.end() :]
        if letter[0] == "m":
            return [*shown, option, value or next(words, "")]
        shown += [f"{option}*"] if value else [option, "*"]
        if not value:
            next(words, None)
        if letter[0] == "c":
            return shown
    return shown
