"""Real data for the demo: the library files of this Python installation, packed into tar shards as training data is."""

from __future__ import annotations

import sysconfig
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "ensurepip", "lib-dynload"})


@dataclass(frozen=True, slots=True)
class Shard:
    """``crc``: of all its bytes, to compare with what the workers read."""

    name: str
    size: int
    crc: int


def pack(folder: Path, *, total: int, count: int) -> list[Shard]:
    """Write ``count`` shards of together about ``total`` bytes into ``folder``; files are taken again if there are not enough."""
    files, shards = _endless(), []
    for number in range(count):
        path = folder / f"shard-{number:03d}.tar"
        with tarfile.open(path, "w") as tar:
            while tar.offset < total / count:
                turn, file = next(files)
                tar.add(file, arcname=f"{turn}/{file.name}", recursive=False)
        data = path.read_bytes()
        shards.append(Shard(path.name, len(data), zlib.crc32(data)))
    return shards


def _endless() -> Iterator[tuple[int, Path]]:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts) and path.is_file())
    if not files:
        raise FileNotFoundError(f"no library files below {library}: this Python has none to show")
    turn = 0
    while True:
        yield from ((turn, file) for file in files)
        turn += 1
