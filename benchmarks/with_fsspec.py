"""Reads through fsspec: ``forebay::`` beside fsspec's own caches. ``python benchmarks/with_fsspec.py [ROW...] [--quick] [--json]``

Objects come from nginx, which logs what it sends. This file is not called ``fsspec.py``, because scripts of this directory, and all that
they import, would take it for the package. What is imported is not timed.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, python
from blocks import _READ, COLUMNS, WANTED, sent_by, write_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers.nginx import nginx

PROTOCOLS = ("forebay", "filecache", "simplecache", "blockcache")


def kind_of(protocol: str) -> str:
    return OURS if protocol == "forebay" else PEER


def options_of(protocol: str, folder: Path) -> dict[str, Any]:
    """Where a protocol keeps what it has fetched."""
    place = str(folder / protocol)
    return {"root": place, "budget": "20GB", "min_free": 0} if protocol == "forebay" else {"cache_storage": place}


def warm(folder: Path, quick: bool) -> list[Line]:
    """Objects that are cached, read again by the same process."""
    import fsspec

    body, count, rounds = random.Random(1).randbytes(100_000), 20 if quick else 200, 1 if quick else 9
    with nginx(folder / "nginx") as server:
        url = server.put("object.bin", body)
        filesystems = {name: fsspec.url_to_fs(f"{name}::{url}", **{name: options_of(name, folder)}) for name in PROTOCOLS}

        def opened(name: str) -> bytes:
            fs, path = filesystems[name]
            with fs.open(path) as file:
                return bytes(file.read())

        def opened_by_url(name: str) -> bytes:
            with fsspec.open(f"{name}::{url}", **{name: options_of(name, folder)}) as file:
                return bytes(file.read())

        def cat(name: str) -> bytes:
            fs, path = filesystems[name]
            return bytes(fs.cat_file(path))

        def local() -> bytes:
            with open(server.files / "object.bin", "rb") as file:
                return file.read()

        def repeated(call: Callable[[], bytes]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(count):
                    call()

            return run

        lines = []
        for call, what, must in (
            (opened, "`fs.open(path)` and `read` of 100 KB, cached", ">= 5x filecache"),
            (opened_by_url, "`fsspec.open(URL)` and `read` of 100 KB, cached", "-"),
            (cat, "`fs.cat_file(path)` of 100 KB, cached", "-"),
        ):
            assert all(call(name) == body for name in PROTOCOLS)
            parts = {name: Part(kind_of(name), repeated(lambda name=name, call=call: call(name)), count) for name in PROTOCOLS}
            line = Line(what, must, interleave(rounds, parts | {"local file": Part(FLOOR, repeated(local), count)}))
            line.met = line.ratio("filecache") >= 5 if must != "-" else None
            lines.append(line)
    return lines


_SETUP = """import fsspec, aiohttp, fsspec.implementations.cached, fsspec.implementations.http
if {name!r} == "forebay":
    import forebay.adapters.fsspec, forebay.fetch.block_files, forebay.remote.http, sqlite3
options = {options!r}"""
_COLD = """
import fsspec, hashlib, json, sys
protocol, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
fs, path = fsspec.url_to_fs(f"{protocol}::{url}", **{protocol: options})
print("ready", flush=True)
sys.stdin.readline()
try:
    with fs.open(path) as file:
        print(hashlib.sha256(file.read()).hexdigest())
except Exception as error:
    print(type(error).__name__)
"""


def cold(folder: Path, quick: bool) -> list[Line]:
    """One object that nobody has, and processes that want it at the same time."""
    body, rounds, many = random.Random(2).randbytes(4_000_000), 1 if quick else 3, 2 if quick else 8
    expected = hashlib.sha256(body).hexdigest()
    fetched = Line(f"a cold URL of 4 MB, {many} processes at once: requests of the object", "1, right bytes in all", unit="GETs")
    fetched.timings = {name: Timing(kind_of(name)) for name in PROTOCOLS}
    right = {name: list[int]() for name in PROTOCOLS}
    with nginx(folder / "nginx") as server:
        for number in range(rounds):
            for name in PROTOCOLS:
                file, place = f"{name}-{number}.bin", folder / f"cold-{number}"
                server.put(file, body)
                command = [sys.executable, "-c", _COLD, name, f"{server.url}/medium/{file}", json.dumps(options_of(name, place))]
                processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(many)]
                for process in processes:
                    assert process.stdout is not None
                    process.stdout.readline()
                for process in processes:
                    assert process.stdin is not None
                    print(file=process.stdin, flush=True)
                answers = [process.communicate()[0].strip() for process in processes]
                right[name].append(answers.count(expected))
                fetched.timings[name].wall.append(server.gets(file)[file])
                shutil.rmtree(place, ignore_errors=True)
    fetched.met = set(fetched.ours.wall) == {1} and set(right["forebay"]) == {many}
    fetched.note = "right bytes in " + ", ".join(f"{'/'.join(map(str, right[name]))} of {many} ({name})" for name in PROTOCOLS)
    return [fetched]


def columns(folder: Path, quick: bool) -> list[Line]:
    """Two columns of a Parquet file."""
    size, rounds = (64_000, 1) if quick else (512_000, 3)
    with nginx(folder / "nginx") as server:
        path = server.files / "table.parquet"
        own = sum(last - first for first, last in write_table(path, 128_000 if quick else 1_000_000, 1.25))
        what = f"2 of {COLUMNS} columns of a Parquet file of {path.stat().st_size / 1e6:,.0f} MB, blocks of {size / 1e6:.3g} MB"
        sent = Line(f"{what}, of {own / 1e6:.0f} MB: sent by the server", f"<= {1.3 * own / 1e6:.0f} MB (1.3x)", unit="MB")
        first, again = Line(f"{what}: first read", "-"), Line("the same, cached, in a new process", "-")
        for line in (sent, first, again):
            line.timings = {name: Timing(kind_of(name)) for name in PROTOCOLS}
        for number in range(rounds):
            for name in PROTOCOLS:
                place, before = folder / f"columns-{number}", sent_by(server)
                options = {name: options_of(name, place) | ({"fetch": "blocks", "block_size": size} if name == "forebay" else {})}
                options |= {"http": {"block_size": size}} if name == "blockcache" else {}
                opened = f'fsspec.open(f"{name}::{{source}}", **options)'
                code = _READ.format(setup=_SETUP.format(name=name, options=options), opened=opened)
                for line in (first, again):
                    wall, cpu, _ = python(code, str(place), f"{server.url}/table.parquet", ",".join(WANTED), str(size))
                    line.timings[name].wall.append(wall)
                    line.timings[name].cpu.append(cpu)
                    if line is first:
                        sent.timings[name].wall.append((sent_by(server) - before) / 1e6)
                shutil.rmtree(place)
    sent.met = sent.ours.median <= 1.3 * own / 1e6
    return [sent, first, again]


ROWS = {"warm": warm, "cold": cold, "columns": columns}

if __name__ == "__main__":
    main("with_fsspec", ROWS)
