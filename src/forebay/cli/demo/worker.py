"""A worker of the demo: reads shards through the cache and goes through every file in them, as a data loader does.

``python -m forebay.cli.demo.worker ROOT``: takes a JSON list of URLs a line. Tells, a line of JSON each: a URL before it is
read, what was read, and ``null`` at the end of the list.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zlib
from dataclasses import asdict, dataclass

from forebay import Cache


@dataclass(frozen=True, slots=True)
class Read:
    """One shard that was read: ``lines`` of source text in ``files``; ``crc`` of all its bytes."""

    url: str
    size: int
    crc: int
    files: int
    lines: int


def read(cache: Cache, url: str) -> Read:
    data = cache.read(url)
    files = lines = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            source = tar.extractfile(member)
            if source is not None:
                files, lines = files + 1, lines + source.read().count(b"\n")
    return Read(url, len(data), zlib.crc32(data), files, lines)


def _tell(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    with Cache(sys.argv[1]) as cache:
        _tell("ready")
        for line in sys.stdin:
            for url in json.loads(line):
                _tell(url)
                _tell(asdict(read(cache, url)))
            _tell(None)


if __name__ == "__main__":
    main()
