"""Claims and barriers beside MosaicML Streaming's. ``python benchmarks/claims.py [ROW...] [--quick] [--json]``"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from _claims import (
    REGISTRIES,
    STREAMING,
    Barrier,
    Claimer,
    Process,
    barriers,
    import_all,
    jobs,
    killed_job,
    meeting,
    of_python,
    registry,
    remove_streamings,
)
from _common import OURS, PEER, Line, Timing, main, seconds

CLAIM = 3e-3
CROSSING = {2: 0.3e-3, 4: 0.8e-3}


def claiming(folder: Path, quick: bool) -> list[Line]:
    """A process claims a directory with a remote again and again, while other jobs live. Its first time is not counted."""
    import_all()
    with registry():
        lines = [_claiming(folder, count, 3 if quick else 50) for count in ((0, 4) if quick else (0, 9, 49))]
    for line in lines[1:]:
        line.note += f"; {line.ours.median / lines[0].ours.median:.2f}x of that with none"
    return lines


def _claiming(folder: Path, count: int, rounds: int) -> Line:
    line = Line(f"claim with {count} live jobs", f"<= {seconds(CLAIM)}, flat")
    line.timings = {label: Timing(way.kind) for label, way in REGISTRIES.items()}
    first = {}
    with contextlib.ExitStack() as stack:
        for label in ("Forebay", STREAMING):
            stack.enter_context(jobs(REGISTRIES[label], folder, count))
        claimers = {label: stack.enter_context(Claimer(way)) for label, way in REGISTRIES.items()}
        for number in range(rounds + 1):
            for label, claim in claimers.items():
                found = claim(str(folder / "own"))
                assert found.prefix is not None
                if number:
                    line.timings[label].wall.append(found.wall)
                    line.timings[label].cpu.append(found.cpu)
                else:
                    first[label] = seconds(found.wall)
    line.met = line.ours.median <= CLAIM
    line.note = f"a process's first {first['Forebay']}, Streaming's {first[STREAMING]}"
    return line


def killed(folder: Path, quick: bool) -> list[Line]:
    """All processes of a job are killed at once; another one claims the same directory."""
    import_all()
    line = Line("claim of the directory of a job that was killed with -9", "as the first: <= 1.2x")
    line.timings = {"Forebay": Timing(OURS), STREAMING: Timing(PEER)}
    usual, failed, rounds = [], 0, 3 if quick else 15
    with registry(), Claimer(REGISTRIES["Forebay"]) as ours, Claimer(REGISTRIES[STREAMING]) as streamings:
        for number in range(rounds + 1):
            local = str(folder / str(number))
            usual.append(ours(local).wall)
            for label, claim in (("Forebay", ours), (STREAMING, streamings)):
                prefix = killed_job(label, local)
                try:
                    found = claim(local)
                finally:
                    if label == STREAMING:
                        remove_streamings(prefix)
                failed += found.prefix is None
                assert found.prefix is not None or label == STREAMING
                if number:
                    line.timings[label].wall.append(found.wall)
                    line.timings[label].cpu.append(found.cpu)
    first = statistics.median(usual[1:])
    line.met = line.ours.median <= 1.2 * first
    line.note = f"the first {seconds(first)}: {line.ours.median / first:.2f}x; Streaming refused it {failed} of {rounds + 1} times"
    return [line]


def crossing(folder: Path, quick: bool) -> list[Line]:
    """Processes that do nothing but cross, again and again; the slowest counts. CPU is that of all together."""
    import_all()
    lines = []
    with registry():
        for parties, must in CROSSING.items():
            ways = barriers() | {"multiprocessing.Barrier": of_python(parties)}
            line = Line(f"barrier crossing, {parties} processes", f"<= {seconds(must)}", {k: Timing(way.kind) for k, way in ways.items()})
            for _ in range(1 if quick else 7):
                for label, way in ways.items():
                    few = (10 if quick else 60) if label == STREAMING else 100 if quick else 2_000
                    wall, cpu = _cross(way, parties, few)
                    line.timings[label].wall.append(wall)
                    line.timings[label].cpu.append(cpu)
            line.met = line.ours.median <= must
            lines.append(line)
    return lines


def _cross(way: Barrier, parties: int, times: int) -> tuple[float, float]:
    def work(parent: Process, rank: int, cross: Callable[[], object]) -> None:
        cross()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            cross()
        parent.tell([time.perf_counter() - began, time.process_time() - cpu])
        parent.hear()

    with meeting(way, parties, work) as born:
        told = [process.hear() for process in born]
    return max(wall for wall, _ in told) / times, sum(cpu for _, cpu in told) / times


def waiting(folder: Path, quick: bool) -> list[Line]:
    """One of two waits for the other, which does not come."""
    import_all()
    long = 2.0 if quick else 10.0
    line = Line(f"CPU of one that waits {long:.0f} s in a barrier", "<= 2 % of a core")
    with registry():
        for label, way in barriers().items():
            spent = []
            for _ in range(1 if quick else 3):
                with meeting(way, 2, _wait) as born:
                    born[0].tell("wait")
                    time.sleep(0.5)  # what it takes to begin is not counted
                    before = born[0].cpu()
                    time.sleep(long)
                    spent.append(born[0].cpu() - before)
            line.timings[label] = Timing(way.kind, spent)
    line.note = f"{line.ours.median / long:.2%} of a core"
    line.met = line.ours.median <= 0.02 * long
    return [line]


def _wait(parent: Process, rank: int, cross: Callable[[], object]) -> None:
    parent.hear()
    cross()


def death(folder: Path, quick: bool) -> list[Line]:
    """Two of three wait; the third is killed. Until both have an error."""
    import_all()
    patience = 3.0 if quick else 20.0
    line = Line("a participant is killed while two wait: until both have the error", "<= 1 s", {"Forebay": Timing(OURS)})
    with registry():
        for label, way in barriers().items():
            for _ in range(2 if quick else 9) if label != STREAMING else range(1):
                told = _die(way, patience)
                if label == STREAMING:
                    still = sum(found is None for found in told)
                    line.note = f"of Streaming's {still} of 2 wait still after {patience:.0f} s"
                else:
                    line.ours.wall.append(max(told))
    line.met = max(line.ours.wall) <= 1.0
    line.note = f"the slowest {seconds(max(line.ours.wall))}; {line.note}"
    return [line]


def _die(way: Barrier, patience: float) -> list[float | None]:
    """Of both that wait: seconds from the kill to the error; None if there was none."""

    def work(parent: Process, rank: int, cross: Callable[[], object]) -> None:
        cross()  # once all come
        parent.tell("crossed")
        try:
            parent.hear()
            parent.tell("waits")
            cross()
        except RuntimeError:  # BrokenBarrierError
            parent.tell(time.monotonic())
            parent.hear()

    with meeting(way, 3, work) as born:
        for process in born:
            assert process.hear() == "crossed"
        for process in born[:2]:
            process.tell("wait")
            assert process.hear() == "waits"
        time.sleep(0.3)
        began = time.monotonic()
        born[2].kill()
        told = [process.hear(patience) for process in born[:2]]
    return [None if at is None else at - began for at in told]


ROWS = {"claim": claiming, "killed": killed, "barrier": crossing, "waiting": waiting, "death": death}

if __name__ == "__main__":
    main("claims", ROWS)
