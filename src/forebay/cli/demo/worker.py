"""A worker of the demo: reads every file of its shards, as a data loader does, while a prefetcher loads the next shards.

``python -m forebay.cli.demo.worker ROOT URL`` reads JSON lists of names below URL, one a line. It prints lines of JSON: a name when its
load begins, what was read of it, and ``null`` at the end of the list.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from forebay import Cache
from forebay.sources import UrlSource

AHEAD = 2
"""Shards that are loaded while the worker reads one."""


@dataclass(frozen=True, slots=True)
class Read:
    """One shard that was read: ``lines`` of source text in ``files``; ``crc`` of all its bytes."""

    name: str
    size: int
    crc: int
    files: int
    lines: int


def read(name: str, data: bytes) -> Read:
    files = lines = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            source = tar.extractfile(member)
            if source is not None:
                files, lines = files + 1, lines + source.read().count(b"\n")
    return Read(name, len(data), zlib.crc32(data), files, lines)


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _announced(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        _print(name)
        yield name


def main() -> None:
    root, url = sys.argv[1:]
    source = UrlSource(url, version="of this demo")  # a fixed version: what one worker loaded serves the others, and the next epoch
    with Cache(root) as cache, cache.prefetcher(source, name="shards", workers=AHEAD + 1) as pool:
        _print("ready")
        for line in sys.stdin:
            names = json.loads(line)
            for name, data in zip(names, pool.stream(_announced(names), ahead=AHEAD), strict=True):
                _print(asdict(read(name, data)))
            _print(None)


if __name__ == "__main__":
    main()
