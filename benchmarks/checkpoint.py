"""A remote directory as a local one, beside Ray's Checkpoint, pyarrow, s3fs and obstore. ``python benchmarks/checkpoint.py [ROW...]``

``--quick``, ``--json``. Behind a real S3 server (Ceph RGW, on loopback), and behind a filesystem of pyarrow's that counts what is read of
it. Everything is written to /dev/shm where there is room, so that a slow disk does not hide what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _checkpoint import MB, Member, Spec, ready
from _common import FLOOR, OURS, PEER, Line, Timing, main, seconds
from _wire import Wire
from tests.servers.counting import Shelf
from tests.servers.rgw import joined, missing

KB = 1_000
SERVER = "BENCH_RGW_FOLDER"
"""Where the S3 server of this run lies, which all rows share."""
LABELS = {
    "forebay": ("Forebay", OURS),
    "ray": ("Ray", PEER),
    "ray_to_directory": ("Ray, to_directory", PEER),
    "arrow": ("pyarrow copy_files", PEER),
    "s3fs": ("s3fs get", PEER),
    "obstore": ("obstore, 16 at once", PEER),
    "obstore_ranges": ("obstore, 8 ranges at once", PEER),
}


@dataclasses.dataclass(frozen=True)
class Files:
    """What the directory holds: so many files of so many bytes."""

    large: tuple[int, int]
    small: tuple[int, int]

    @property
    def count(self) -> int:
        return self.large[0] + self.small[0]

    @property
    def size(self) -> int:
        return self.large[0] * self.large[1] + self.small[0] * self.small[1]

    def bodies(self) -> Iterator[tuple[str, bytes]]:
        for kind, (count, size) in (("model", self.large), ("part", self.small)):
            for number in range(count):
                yield f"{kind}/{number:05d}.bin", os.urandom(size)

    def __str__(self) -> str:
        (many, size), (more, less) = self.large, self.small
        if self.count == 1:
            return f"one object of {size / MB:g} MB"
        return f"{many} files of {size / MB:g} MB" + (f" and {more} of {less / KB:g} KB" if more else "")


def sizes(quick: bool) -> Files:
    return Files((4, 1 * MB), (10, 10 * KB)) if quick else Files((32, 4 * MB), (200, 10 * KB))


def processes(quick: bool) -> int:
    return 2 if quick else 8


_numbers = itertools.count()

# -- the two servers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def s3(folder: Path, files: Files) -> Iterator[Spec]:
    """The directory behind an S3 server."""
    with joined(Path(os.environ[SERVER])) as server, contextlib.closing(server.client()) as client:
        bucket = f"bench-{os.getpid()}-{next(_numbers)}"
        client.create_bucket(Bucket=bucket)
        for name, body in files.bodies():
            _upload(client, bucket, f"ckpt/{name}", body)
        yield Spec(f"{bucket}/ckpt", "", "", server.url, server.key, server.secret)


def _upload(client: Any, bucket: str, name: str, body: bytes) -> None:
    """In parts, where it is large."""
    part = 64 * MB
    if len(body) <= part:
        client.put_object(Bucket=bucket, Key=name, Body=body)
        return
    where = {"Bucket": bucket, "Key": name}
    where["UploadId"] = client.create_multipart_upload(**where)["UploadId"]
    told = []
    for number, at in enumerate(range(0, len(body), part), 1):
        told.append({"PartNumber": number, "ETag": client.upload_part(**where, PartNumber=number, Body=body[at : at + part])["ETag"]})
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": told})


@contextlib.contextmanager
def counting(folder: Path, files: Files) -> Iterator[tuple[Spec, Shelf]]:
    """The directory behind a filesystem that counts."""
    shelf = Shelf(folder / "shelf")
    shelf.fill("bench/ckpt", dict(files.bodies()))
    yield Spec("bench/ckpt", "", "", shelf=str(shelf.place)), shelf


@contextlib.contextmanager
def fresh(spec: Spec, folder: Path) -> Iterator[Spec]:
    """With a root and a target of its own; what Ray leaves in its temporary directory goes too."""
    place = folder / f"run-{next(_numbers)}"
    place.mkdir()
    try:
        yield dataclasses.replace(spec, root=str(place / "root"), target=str(place / "target"))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def hold(way: str, spec: Spec, count: int = 1, files: Files | None = None) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until all of ``count`` processes, let loose at once, hold the directory; and what each says of it."""
    members = [Member(way, dataclasses.replace(spec, target=f"{spec.target}-{number}")) for number in range(count)]
    with ready(members):
        for each in members:
            each.go()
        said = [each.held() for each in members]
        for each in members:
            each.leave()
    for each in said:
        assert files is None or each["files"] == [files.count, files.size], f"{way}: {each['files']} of {[files.count, files.size]}"
    return max(each["ended"] for each in said) - min(each["began"] for each in said), said


# -- a crowd -----------------------------------------------------------------------------------------------------------


def reads(folder: Path, quick: bool) -> list[Line]:
    """What several processes, each with a handle of its own, read of the remote."""
    files, many = sizes(quick), processes(quick)
    what = f"{many} processes, {many} handles, {files}: "
    opens = Line(f"{what}opens", f"{files.count}: each file once", unit="opens")
    sent = Line(f"{what}bytes read", f"{files.size:,}: each byte once", unit="bytes")
    with counting(folder, files) as (spec, shelf):
        for way in ("forebay", "ray", "arrow"):
            label, kind = LABELS[way]
            with fresh(spec, folder) as place:
                shelf.forget()
                wall, _ = hold(way, place, many, files)
            opens.timings[label] = Timing(kind, [len(shelf.opens)])
            sent.timings[label] = Timing(kind, [shelf.sent])
            sent.note += f"{'; ' if sent.note else ''}{label} {seconds(wall)}"
    opens.met = opens.ours.median == files.count
    sent.met = sent.ours.median == files.size
    return [opens, sent]


def crowd(folder: Path, quick: bool) -> list[Line]:
    """Until all of several processes hold what is cold, beside one process of the others."""
    files, many, rounds = sizes(quick), processes(quick), 1 if quick else 5
    contestants = {"forebay": many, "obstore": 1, "arrow": 1, "s3fs": 1, "ray_to_directory": 1, "ray": many}
    line = Line(f"{many} processes, {many} handles, {files} from S3: until all hold it", "<= 1.2x the best process of the others alone")
    for way, count in contestants.items():
        line.timings[name(way, count)] = Timing(LABELS[way][1])
    lone = Timing(OURS)
    with s3(folder, files) as spec:
        for _ in range(rounds):
            for way, count in (*contestants.items(), ("forebay", 1)):
                with fresh(spec, folder) as place:
                    wall, said = hold(way, place, count, files)
                timing = lone if (way, count) == ("forebay", 1) else line.timings[name(way, count)]
                timing.wall.append(wall)
                timing.cpu.append(sum(each["cpu"] for each in said))
    best = min(timing.median for label, timing in line.timings.items() if timing.kind == PEER and not label.startswith(f"{many} x"))
    line.note = f"one process alone {seconds(lone.median)}; {line.ours.median / best:.3g}x the best alone"
    line.met = line.ours.median <= 1.2 * best
    return [line]


def name(way: str, count: int) -> str:
    return f"{count} x {LABELS[way][0]}" if count > 1 and way != "forebay" else LABELS[way][0]


# -- again -------------------------------------------------------------------------------------------------------------


def second(folder: Path, quick: bool) -> list[Line]:
    """A new process wants what another one had: with the opening of the cache."""
    files, rounds = sizes(quick), 2 if quick else 15
    wall = Line(f"second use, new process, {files} from S3", "<= 20 ms", {"Forebay": Timing(OURS), "Ray": Timing(PEER)})
    sent = Line("the same: payload bytes read", "0", {"Forebay": Timing(OURS), "Ray": Timing(PEER)}, unit="bytes")
    with s3(folder, files) as spec, fresh(spec, folder) as place:
        for way, count in (("forebay", rounds), ("ray", 2)):
            hold(way, place, 1, files)
            wall.timings[LABELS[way][0]].wall += [hold(way, place, 1, files)[0] for _ in range(count)]
    with counting(folder, files) as (there, shelf), fresh(there, folder) as place:
        for way in ("forebay", "ray"):
            hold(way, place, 1, files)
            shelf.forget()
            hold(way, place, 1, files)
            sent.timings[LABELS[way][0]].wall.append(shelf.sent)
            if way == "forebay":
                sent.note = f"{len(shelf.asked())} questions"
    wall.met = wall.ours.median <= 0.020
    sent.met = sent.ours.median == 0
    return [wall, sent]


def first(folder: Path, quick: bool) -> list[Line]:
    """One process, nothing in its cache: from S3, and from a filesystem of pyarrow."""
    files, rounds = sizes(quick), 1 if quick else 5
    lines = []
    for what, must, ways in (
        ("S3", "<= 1.2x obstore", ("forebay", "obstore", "arrow", "ray")),
        ("a pyarrow filesystem", "<= 1.3x pyarrow alone", ("forebay", "arrow", "ray")),
    ):
        line = Line(f"first use, {files} from {what}", must)
        with contextlib.ExitStack() as stack:
            spec = stack.enter_context(s3(folder, files)) if what == "S3" else stack.enter_context(counting(folder, files))[0]
            for _ in range(rounds):
                for way in ways:
                    with fresh(spec, folder) as place:
                        wall, said = hold(way, place, 1, files)
                    timing = line.timings.setdefault(LABELS[way][0], Timing(LABELS[way][1]))
                    timing.wall.append(wall)
                    timing.cpu.append(said[0]["cpu"])
        peer, most = (LABELS["obstore"][0], 1.2) if what == "S3" else (LABELS["arrow"][0], 1.3)
        line.met = line.ratio(peer) >= 1 / most
        lines.append(line)
    return lines


# -- one large object --------------------------------------------------------------------------------------------------


def large(folder: Path, quick: bool) -> list[Line]:
    """One object of 1 GB, into a directory of its own."""
    files, rounds = Files((1, 64 * MB if quick else 1000 * MB), (0, 0)), 1 if quick else 5
    line = Line(f"{files} from S3, ranges in parallel", ">= 0.9x bare obstore")
    memory = Line("the same: most memory taken, over the import", "<= 300 MB", unit="bytes")
    ways = ("forebay", "obstore", "obstore_ranges", "arrow", "s3fs", "ray_to_directory")
    for way in ways:
        line.timings[LABELS[way][0]] = Timing(LABELS[way][1])
        memory.timings[LABELS[way][0]] = Timing(LABELS[way][1])
    line.timings["pwrite of as much"] = Timing(FLOOR)
    with s3(folder, files) as spec:
        for _ in range(rounds):
            for way in ways:
                with fresh(spec, folder) as place:
                    wall, said = hold(way, place, 1, files)
                line.timings[LABELS[way][0]].wall.append(wall)
                line.timings[LABELS[way][0]].cpu.append(said[0]["cpu"])
                memory.timings[LABELS[way][0]].wall.append(said[0]["grown"] * MB)
            line.timings["pwrite of as much"].wall.append(_write(folder / "floor", files.size))
    bare = min(line.ratio(LABELS[way][0]) for way in ("obstore", "obstore_ranges"))
    line.note = f"{files.size / line.ours.median / MB:.0f} MB/s, {bare:.3g}x the better of obstore"
    line.met = bare >= 0.9
    memory.met = max(memory.ours.wall) <= 300 * MB
    return [line, memory, _through_arrow(folder, files)]


def _write(path: Path, size: int) -> float:
    block = os.urandom(MB)
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.writelines(block for _ in range(size // MB))
    wall = time.perf_counter() - began
    path.unlink()
    return wall


def _through_arrow(folder: Path, files: Files) -> Line:
    """Of a filesystem with connections: a process beside ours asks it, which counts whole."""
    line = Line(f"{files} from a pyarrow filesystem: most memory taken, over the import", "<= 300 MB, the helper process too", unit="bytes")
    with counting(folder, files) as (spec, _):
        for way in ("forebay", "arrow"):
            with fresh(dataclasses.replace(spec, helper=True), folder) as place:
                _, said = hold(way, place, 1, files)
            line.timings[LABELS[way][0]] = Timing(LABELS[way][1], [said[0]["grown"] * MB])
    line.met = line.ours.median <= 300 * MB
    return line


# -- killed ------------------------------------------------------------------------------------------------------------


def resume(folder: Path, quick: bool) -> list[Line]:
    """The process that downloads is killed when half of the bytes have come; what the next one asks for."""
    lines = []
    for files in (sizes(quick), Files((1, 64 * MB if quick else 1000 * MB), (0, 0))):
        line = Line(f"killed when half of {files} from S3 had come: bytes that come again", "<= 55 %", unit="bytes")
        with s3(folder, files) as spec, Wire(spec.endpoint) as wire:
            for way in ("forebay", "ray"):
                with fresh(dataclasses.replace(spec, endpoint=wire.url), folder) as place:
                    _die_half_way(way, place, wire, files)
                    came = wire.carried
                    hold(way, place, 1, files)
                    line.timings[LABELS[way][0]] = Timing(LABELS[way][1], [wire.carried - came])
        line.note = f"{line.ours.median / files.size:.1%}"
        line.met = line.ours.median <= 0.55 * files.size
        lines.append(line)
    return lines


def _die_half_way(way: str, spec: Spec, wire: Wire, files: Files) -> None:
    """So slowly that half is half."""
    before, wire.rate = wire.carried, 100 * MB
    member = Member(way, spec)
    with ready([member]):
        member.go()
        while wire.carried - before < files.size / 2:
            time.sleep(0.001)
        member.kill()
    wire.rate = 0
    wire.drain()


ROWS = {"reads": reads, "crowd": crowd, "first": first, "second": second, "large": large, "resume": resume}


def shared(folder: Path | None) -> contextlib.AbstractContextManager[object]:
    """The S3 server of this run. The processes of the rows find it in the environment."""
    stack = contextlib.ExitStack()
    asked = set(ROWS).intersection(sys.argv) or set(ROWS)
    if SERVER not in os.environ and asked != {"reads"}:
        if reason := missing():
            raise SystemExit(f"{reason}: see `make deps`")
        os.environ[SERVER] = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True))
        stack.enter_context(joined(Path(os.environ[SERVER])))
    return stack


if __name__ == "__main__":
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and shutil.disk_usage(memory).free > 8e9 else None
    with shared(place):
        main("checkpoint", ROWS, folder=place)
