"""Parts of large objects: two neighbouring columns of a parquet file. ``python benchmarks/blocks.py [ROW...] [--quick] [--json]``

The file has 20 columns of float64, uncompressed, in row groups of 1,000,000 rows, 1 GB in all, and comes from nginx, which logs how many
bytes it sent. Each round is a fresh process with an empty cache, and then another one that finds the cache filled. What pyarrow imports
when it reads its first table is not timed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from _common import FLOOR, OURS, PEER, Line, Timing, main, python

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers.nginx import Nginx, nginx

COLUMNS, WANTED = 20, ["c07", "c08"]

_READ = """
import io, json, os, sys, time
import pyarrow as pa, pyarrow.parquet as pq
pq.write_table(pa.table({{"a": [1.0]}}), warm := io.BytesIO())
pq.read_table(warm, columns=["a"])  # imports what reading a table imports, ten times as long as a cached read takes
place, source, wanted, size = sys.argv[1], sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])
{setup}
wall, cpu = time.perf_counter(), time.process_time()
with {opened} as file:
    table = pq.read_table(file, columns=wanted)
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, table.nbytes]), flush=True)
os._exit(0)  # pyarrow's threads may abort the end of a process that has just read a Python file, whichever it is
"""
_CACHE = """
import forebay.cache, forebay.fetch.block_files, forebay.remote.http, sqlite3
cache = forebay.Cache(place, budget="20GB", min_free=0)
"""
_OURS = _READ.format(setup=_CACHE, opened="cache.open(source, block_size=size)")
_WHOLE = _READ.format(setup=_CACHE, opened="cache.open(source)")
_BLOCKCACHE = _READ.format(
    setup='import fsspec, aiohttp\noptions = {"http": {"block_size": size}, "blockcache": {"cache_storage": place}}',
    opened='fsspec.open(f"blockcache::{source}", **options)',
)
_FSSPEC = _READ.format(setup="import fsspec, aiohttp", opened="fsspec.open(source)")
_FILE = _READ.format(setup="", opened='open(source, "rb")')


def columns(size: int, must: float | None, folder: Path, quick: bool, *, rounds: int = 3) -> list[Line]:
    """``size``: bytes of a block. ``must``: how many times their own bytes two columns may take; None: a block more for each edge."""
    rows, groups, rounds = (128_000, 2, 1) if quick else (1_000_000, 6, rounds)
    size = size // 8 if quick else size
    with nginx(folder / "nginx") as server:
        path = server.files / "table.parquet"
        chunk = write_table(path, rows, groups + (0 if quick else 0.25))
        own = sum(last - first for first, last in chunk)
        limit = must if must is not None else own_and_edges(chunk, size) / own
        what = f"2 of {COLUMNS} columns of a parquet file of {path.stat().st_size / 1e6:,.0f} MB, blocks of {size / 1e6:.3g} MB"
        sent = Line(f"{what}, of {own / 1e6:.0f} MB: sent by the server", f"<= {limit * own / 1e6:.0f} MB ({limit:.3g}x)", unit="MB")
        first, again = Line(f"{what}: first read", "-"), Line("the same, cached", "-")
        codes = {
            "Forebay": (OURS, _OURS, f"{server.url}/table.parquet"),
            "Forebay, whole object": (PEER, _WHOLE, f"{server.url}/table.parquet"),
            "fsspec blockcache": (PEER, _BLOCKCACHE, f"{server.url}/table.parquet"),
            "fsspec": (PEER, _FSSPEC, f"{server.url}/table.parquet"),
            "local file": (FLOOR, _FILE, str(path)),
        }
        for line in (sent, first, again):
            line.timings = {label: Timing(kind) for label, (kind, _, _) in codes.items()}
        del sent.timings["local file"]
        for number in range(rounds):
            for label, (_, code, source) in codes.items():
                place, before = folder / f"place-{number}", sent_by(server)
                place.mkdir()
                for line in (first, again):
                    wall, cpu, _ = python(code, str(place), source, ",".join(WANTED), str(size))
                    line.timings[label].wall.append(wall)
                    line.timings[label].cpu.append(cpu)
                    if line is first and label in sent.timings:
                        sent.timings[label].wall.append((sent_by(server) - before) / 1e6)
                shutil.rmtree(place)
    sent.met = sent.ours.median <= limit * own / 1e6
    return [sent, first, again]


def write_table(path: Path, rows: int, groups: float) -> list[tuple[int, int]]:
    """Write the file; gives where the wanted columns begin and end in each row group."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, names = np.random.default_rng(1), [f"c{number:02d}" for number in range(COLUMNS)]
    schema = pa.schema([(name, pa.float64()) for name in names])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        left = int(rows * groups)
        while left > 0:
            count = min(rows, left)
            writer.write_table(pa.table({name: rng.random(count) for name in names}), row_group_size=count)
            left -= count
    metadata, edges = pq.ParquetFile(path).metadata, list[tuple[int, int]]()
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(names.index(name)) for name in WANTED]
        first = chunks[0].data_page_offset
        edges.append((first, first + sum(chunk.total_compressed_size for chunk in chunks)))
    return edges


def own_and_edges(chunks: Sequence[tuple[int, int]], size: int) -> int:
    """The bytes of the chunks with a block more for each edge of each, and one for the footer."""
    return sum(last - first + 2 * size for first, last in chunks) + size


def sent_by(server: Nginx) -> int:
    """Bytes of bodies that the server has sent."""
    return sum(int(line.rsplit('"', 1)[1].split()[1]) for line in server.log.read_text().splitlines())


ROWS = {"512k": partial(columns, 512_000, 1.3), "8m": partial(columns, 8 << 20, None)}

if __name__ == "__main__":
    main("blocks", ROWS)
