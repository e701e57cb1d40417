"""A verb takes no more memory for many entries than for few: each in a process of its own, whose largest resident set is read."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Cache
from tests.harness import MiB

FEW, MANY = 2000, 20_000
KEY = "k" * 600
"""So long that the names alone of `MANY` entries are more than `MOST`."""
MOST = 6 * MiB

VERB = """
import sys
from forebay.cache import entries as listing
from forebay._engine import check
from forebay._engine import seeing
from forebay._engine.catalog import spill
from forebay.cli import main, output

seeing.ENTRIES_PER_PAGE = check.AT_ONCE = output.PAGE_ROWS = 200
listing.IN_MEMORY, spill._CACHE = 1000, "-500"
code = main.run(sys.argv[1:])
with open("/proc/self/status") as status:  # not ru_maxrss: that begins with what the process had that started this one
    print(next(line for line in status if line.startswith("VmHWM:")), file=sys.stderr)
sys.exit(code)
"""


def plant(place: Path, count: int) -> None:
    """Sound blobs, quicker than they are put: as values, whose rows and files are made blobs of."""
    with Cache(place, budget=count * 16_384, min_free=0) as cache:
        space = cache.space("many")
        for n in range(count):
            space.put(f"{n:08}{KEY}", b"x" * 10)
    con = sqlite3.connect(place / "catalog.sqlite")
    with con:
        con.execute("UPDATE entries SET kind = 'blob', charge = 4096")
        con.execute("UPDATE spaces SET charge = 4096 * entries, inline = 0")
        con.execute("DELETE FROM payloads")
    ids = con.execute("SELECT id FROM entries").fetchall()
    con.close()
    assert len(ids) == count
    for (id,) in ids:
        folder = place / f"blobs/{id & 0xFF:02x}"
        folder.mkdir(exist_ok=True)
        (folder / f"{id:016x}").write_bytes(b"x" * 10)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    memory = Path("/dev/shm")
    above = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("roots")
    with tempfile.TemporaryDirectory(prefix="forebay-test-", dir=above) as name:
        places = {count: Path(name) / str(count) for count in (FEW, MANY)}
        for count, place in places.items():
            plant(place, count)
        yield places


def peak(place: Path, *words: str) -> int:
    command = [sys.executable, "-c", VERB, "-C", str(place), *words]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-2]) << 10


@pytest.mark.rotates
@pytest.mark.parametrize(
    "verb", ["ls", "ls -q", "ls -q --filter size>1", "ls --json", "ls -s size", "prune -n", "clear -n", "verify --quick", "doctor"]
)
def test_memory_does_not_grow_with_what_is_kept(roots: dict[int, Path], verb: str) -> None:
    assert peak(roots[MANY], *verb.split()) - peak(roots[FEW], *verb.split()) < MOST
