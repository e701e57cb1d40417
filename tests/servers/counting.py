"""A remote that counts, and misbehaves as it is told: objects in a directory of this host, seen as a filesystem of pyarrow or fsspec.

All processes that have it share the journal and the orders, which are files: it may be asked in the helper process, or in a fork.
"""

from __future__ import annotations

import builtins
import glob
import hashlib
import io
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

HANG = 60.0
"""Seconds after which something is taken to hang: a guard, not a measure."""


def content(name: str, size: int) -> bytes:
    """Bytes that no other name has."""
    return random.Random(f"{name} {size}").randbytes(size)


class Asked(NamedTuple):
    """A line of the journal: ``list``, ``stat``, ``open``, ``read`` (of what bytes), ``write``, ``delete``, ``stalled``; by whom."""

    verb: str
    name: str
    start: int
    length: int
    process: int


class Shelf:
    """The objects, what was asked for (`asked`), and the orders: `stall`, `cut`, `fail`, `swap`, `lists`, `slow`.

    Names are whole paths, such as ``bucket/step_1/model.pt``. Pickles as its place."""

    def __init__(self, place: Path | str) -> None:
        self.place = Path(place)
        for folder in ("objects", "orders", "new"):
            (self.place / folder).mkdir(parents=True, exist_ok=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shelf, (str(self.place),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shelf) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    # -- objects ---------------------------------------------------------------------------------------------------

    def put(self, name: str, body: bytes) -> None:
        """In place of what was there: who has that open reads it on."""
        new, target = self.place / "new" / f"{os.getpid()}-{time.monotonic_ns()}", self.path(name)
        new.write_bytes(body)
        target.parent.mkdir(parents=True, exist_ok=True)
        new.rename(target)

    def fill(self, folder: str, files: Mapping[str, bytes]) -> None:
        for name, body in files.items():
            self.put(f"{folder}/{name}", body)

    def remove(self, name: str) -> None:
        """Directories go with their last file, as in a store of objects."""
        gone = self.path(name)
        gone.unlink()
        while not os.listdir(gone := gone.parent):
            gone.rmdir()

    def path(self, name: str) -> Path:
        return self.place / "objects" / name

    def below(self, folder: str) -> dict[str, bytes]:
        """What is there now."""
        top = self.path(folder)
        return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}

    # -- the journal -----------------------------------------------------------------------------------------------

    def note(self, verb: str, name: str, start: int = 0, length: int = 0) -> None:
        with open(self.place / "journal", "ab", buffering=0) as file:
            file.write(json.dumps([verb, name, start, length, os.getpid()]).encode() + b"\n")

    def asked(self, verb: str | None = None, name: str | None = None) -> list[Asked]:
        """What was asked for since `forget`, by all processes."""
        journal = self.place / "journal"
        lines = journal.read_bytes().splitlines() if journal.exists() else []
        found = [Asked(*json.loads(line)) for line in lines]
        return [each for each in found if verb in (None, each.verb) and (name is None or each.name.endswith(name))]

    def forget(self) -> None:
        (self.place / "journal").unlink(missing_ok=True)

    @property
    def opens(self) -> list[str]:
        """The names that were opened, in order of name."""
        return sorted(each.name for each in self.asked("open"))

    @property
    def sent(self) -> int:
        """Bytes that were read."""
        return sum(each.length for each in self.asked("read"))

    def wait(self, verb: str, name: str | None = None, times: int = 1) -> None:
        """Until that was asked for, so many times."""
        deadline = time.monotonic() + HANG
        while len(self.asked(verb, name)) < times:
            assert time.monotonic() < deadline, f"nobody came to {verb} {name}: {self.asked()}"
            time.sleep(0.005)

    # -- orders ----------------------------------------------------------------------------------------------------

    def _order(self, what: str, name: str = "") -> Path:
        short = quote(name, safe="")
        return self.place / "orders" / f"{what}-{short if len(short) < 200 else hashlib.sha256(name.encode()).hexdigest()}"

    def give(self, what: str, name: str = "", **facts: Any) -> None:
        order = self._order(what, name)
        for used in order.parent.glob(f"{glob.escape(order.name)}.*"):
            used.unlink()
        order.write_text(json.dumps(facts))

    def withdraw(self, what: str, name: str = "") -> None:
        self._order(what, name).unlink(missing_ok=True)

    def told(self, what: str, name: str = "") -> dict[str, Any] | None:
        try:
            return json.loads(self._order(what, name).read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def stall(self, name: str, after: int = 0) -> None:
        """Reads that go past byte ``after`` of it stand still, until `go`."""
        self.give("stall", name, after=after)

    def go(self, name: str) -> None:
        self.withdraw("stall", name)

    def cut(self, name: str, after: int, times: int = 1 << 30) -> None:
        """The first ``times`` reads that go past byte ``after`` give nothing from there on."""
        self.give("cut", name, after=after, times=times)

    def fail(self, name: str, kind: str = "OSError", text: str = "no such luck", times: int = 1 << 30) -> None:
        """The first ``times`` times it is opened, that raises a built-in error. The name ``"list"``: listings."""
        self.give("fail", name, kind=kind, text=text, times=times)

    def swap(self, name: str, body: bytes, after: int = 0) -> None:
        """Once bytes past ``after`` of it were read, it is another object."""
        (self.place / "new" / f"swap-{quote(name, safe='')}").write_bytes(body)
        self.give("swap", name, after=after)

    def lists(self, *names: str) -> None:
        """Listings show these as well, whatever they are."""
        self.give("lists", names=names)

    def slow(self, seconds: float) -> None:
        """Each read takes so long."""
        self.give("slow", seconds=seconds)

    def use_up(self, what: str, name: str, times: int) -> bool:
        """Whether it is one of the first ``times`` times, over all processes."""
        if times >= 1000:
            return True
        for n in range(times):
            try:
                os.close(os.open(f"{self._order(what, name)}.{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            return True
        return False

    # -- what filesystems ask --------------------------------------------------------------------------------------

    def open(self, name: str) -> _Reader:
        self.note("open", name)
        self._obey_fail(name)
        return _Reader(self, name)

    def _obey_fail(self, name: str) -> None:
        order = self.told("fail", name)
        if order is not None and self.use_up("fail", name, order["times"]):
            raise getattr(builtins, order["kind"])(order["text"])

    def stat(self, name: str) -> os.stat_result | None:
        """None: there is nothing."""
        self.note("stat", name)
        try:
            return self.path(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, folder: str, *, deep: bool) -> Iterator[tuple[str, os.stat_result | None]]:
        """Names, and what they are; None of those that are made up. FileNotFoundError where there is no such directory."""
        self.note("list", folder)
        self._obey_fail("list")
        top = self.path(folder)
        for path in sorted(top.rglob("*") if deep else top.iterdir()):
            yield str(path.relative_to(self.place / "objects")), path.stat()
        yield from ((name, None) for name in (self.told("lists") or {"names": []})["names"] if name.startswith(f"{folder}/"))

    def save(self, name: str, body: bytes) -> None:
        self.note("write", name, 0, len(body))
        self.put(name, body)

    def delete(self, name: str) -> None:
        self.note("delete", name)
        self.remove(name)

    # -- as filesystems --------------------------------------------------------------------------------------------

    def arrow(self, *, helper: bool = False) -> Any:
        """As a pyarrow filesystem; ``helper``: one that must be asked in the helper process."""
        from pyarrow.fs import PyFileSystem

        from tests.servers.counting_arrow import Far, Near

        return PyFileSystem(Far(self) if helper else Near(self))

    def fsspec(self, *, helper: bool = False, etags: bool = True) -> Any:
        """As an fsspec filesystem, with strong ETags or with none."""
        from tests.servers.counting_fsspec import Far, Near

        return (Far if helper else Near)(str(self.place), etags=etags)


class _Reader(io.RawIOBase):
    """One version of an object, open; what the orders say is done at each read."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        super().__init__()
        self._shelf, self._name, self._at = shelf, name, 0
        self._file = open(shelf.path(name), "rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, size: int = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self._at + size, self.size)
        end = self._obey(end)
        data = os.pread(self._file.fileno(), max(0, end - self._at), self._at)
        self._shelf.note("read", self._name, self._at, len(data))
        self._swap(end)
        self._at += len(data)
        return data

    def _obey(self, end: int) -> int:
        shelf, name = self._shelf, self._name
        if (slow := shelf.told("slow")) is not None:
            time.sleep(slow["seconds"])
        if (stall := shelf.told("stall", name)) is not None and end > stall["after"]:
            shelf.note("stalled", name)
            deadline = time.monotonic() + HANG
            while shelf.told("stall", name) is not None:
                assert time.monotonic() < deadline, f"nobody let {name} go"
                time.sleep(0.005)
        if (cut := shelf.told("cut", name)) is not None and end > cut["after"] and shelf.use_up("cut", name, cut["times"]):
            return min(end, int(cut["after"]))
        return end

    def _swap(self, end: int) -> None:
        order = self._shelf.told("swap", self._name)
        if order is not None and end > order["after"] and self._shelf.use_up("swap", self._name, 1):
            self._shelf.withdraw("swap", self._name)
            (self._shelf.place / "new" / f"swap-{quote(self._name, safe='')}").rename(self._shelf.path(self._name))

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()


class Writer(io.BytesIO):
    """What is written becomes an object when it is closed."""

    def __init__(self, save: Callable[[bytes], None]) -> None:
        super().__init__()
        self._save = save

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            self._save(self.getvalue())
        super().close()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")
