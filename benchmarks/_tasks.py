"""Those who keep outputs of functions: ours, the peers and the floor, each behind the same three calls.

CHIA's cache is an actor of Ray: it is measured where the path of its source is given (``--chia PATH``), with a Ray of two processors.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from _common import FLOOR, OURS, PEER

CHIA = "BENCH_CHIA"
"""The variable in which the path of CHIA's source comes to the rows."""
OURS_LABEL = "Forebay"


class Keeper(Protocol):
    """One that keeps values by tag."""

    kind: str

    def write(self, tag: str, value: Any) -> object: ...

    def read(self, tag: str) -> Any: ...

    def clear(self) -> object:
        """Give back what was written. Not timed."""


class Forebay:
    kind = OURS

    def __init__(self, folder: Path, codec: str = "pickle") -> None:
        import forebay

        self.cache = forebay.Cache(folder / "root", budget="16GB", min_free=0)
        self.tasks = self.cache.tasks("bench", codec=codec)
        self.write, self.clear = self.tasks.write, self.tasks.flush

    def read(self, tag: str) -> Any:
        hit, value = self.tasks.read(tag)
        assert hit
        return value


class Floor:
    """A file for each value: the buffers of its pickle one behind the other, mapped when they are read."""

    kind = FLOOR

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "floor"
        self.folder.mkdir()

    def write(self, tag: str, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, 5, buffer_callback=buffers.append)
        raws = [buffer.raw() for buffer in buffers]
        with open(self.folder / f"{tag}.part", "wb", buffering=0) as file:
            file.write(b"%8d%8d%s" % (len(head), len(raws), b"".join(b"%16d" % raw.nbytes for raw in raws)))
            file.write(head)
            for raw in raws:
                at = 0
                while at < raw.nbytes:
                    at += file.write(raw[at:]) or 0
        os.rename(self.folder / f"{tag}.part", self.folder / tag)

    def read(self, tag: str) -> Any:
        with open(self.folder / tag, "rb", buffering=0) as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        head, count = int(view[:8]), int(view[8:16])
        sizes = [int(view[16 + 16 * n : 32 + 16 * n]) for n in range(count)]
        at = 16 + 16 * count
        body, at = view[at : at + head], at + head
        parts = []
        for size in sizes:
            parts.append(view[at : at + size])
            at += size
        return pickle.loads(body, buffers=parts)

    def clear(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()


_output: Any = None


def output(tag: str) -> Any:
    """What was written last: joblib keeps what functions of modules give."""
    return _output


class Joblib:
    """joblib.Memory keeps by arguments: the function's argument is the tag."""

    kind = PEER

    def __init__(self, folder: Path, mmap_mode: str | None = None) -> None:
        import joblib

        self.memory = joblib.Memory(folder / f"joblib-{mmap_mode}", mmap_mode=mmap_mode, verbose=0)
        self.read = self.memory.cache(output)

    def write(self, tag: str, value: Any) -> None:
        global _output
        _output = value
        self.read(tag)
        _output = None  # a read that runs it is found out

    def clear(self) -> None:
        self.memory.clear(warn=False)


class Disk:
    kind = PEER

    def __init__(self, folder: Path) -> None:
        import diskcache

        self.cache = diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)

    def write(self, tag: str, value: Any) -> None:
        self.cache.set(tag, value)

    def read(self, tag: str) -> Any:
        value = self.cache.get(tag)
        assert value is not None
        return value

    def clear(self) -> None:
        self.cache.clear()


class Chia:
    """Its actor, asked as its users do."""

    kind = PEER

    def __init__(self, folder: Path, budget: int = 16 << 30) -> None:
        import ray

        self._get = ray.get
        started_ray()
        self.handle = chia().start_cache(budget, str(folder / "chia"))

    def write(self, tag: str, value: Any) -> None:
        assert self._get(self.handle.write.remote(tag, value))

    def read(self, tag: str) -> Any:
        hit, value = self._get(self.handle.read.remote(tag))
        assert hit
        return value

    def clear(self) -> None:
        self._get(self.handle.flush.remote())


def chia() -> Any:
    """CHIA's cache module."""
    source = os.environ[CHIA]
    if source not in sys.path:
        sys.path.insert(0, source)
    return importlib.import_module("chia.base.cache")


def with_chia() -> bool:
    return bool(os.environ.get(CHIA))


def started_ray() -> None:
    """A Ray of two processors on this machine, whose workers find what this process finds."""
    import ray

    if not ray.is_initialized():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.environ.get(CHIA)]))
        ray.init("local", num_cpus=2, object_store_memory=1 << 30, include_dashboard=False, logging_level="ERROR", log_to_driver=False)


def keepers(folder: Path, *, floor: bool = True) -> dict[str, Keeper]:
    """All who can be had here; ours come first."""
    made: dict[str, Callable[[], Keeper]] = {
        OURS_LABEL: lambda: Forebay(folder),
        "file per value": lambda: Floor(folder),
        "joblib": lambda: Joblib(folder),
        "joblib mmap": lambda: Joblib(folder, "r"),
        "diskcache": lambda: Disk(folder),
    }
    if not floor:
        del made["file per value"]
    if with_chia():
        made["CHIA"] = lambda: Chia(folder)
    return {label: make() for label, make in made.items()}
