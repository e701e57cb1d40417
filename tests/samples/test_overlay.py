"""Arrays of samples whose files lie in the lower layer of an overlay, as those of a container image do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, os, subprocess, sys
import forebay

place, is_reader = sys.argv[1], sys.argv[2] == "reader"
options = {"length": 1000, "codec": "raw", "fingerprint": "1"}


def payload(slot):
    return hashlib.shake_128(b"%d" % slot).digest(300 + slot % 7 * 50)


def fill(root, first, last):
    with forebay.Cache(root, budget=100_000_000) as cache:
        samples = cache.samples("a", **options)
        for slot in range(first, last):
            samples.put(slot, payload(slot))
        samples.close()


def right(samples, first, last):
    found = [(slot, samples.get(slot)) for slot in range(first, last)]
    assert all(bytes(data) == payload(slot) for slot, data in found if data is not None)
    return sum(data is not None for _, data in found)


def child(function, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def look(root):
    if is_reader:
        child(fill, root, 100, 100)  # opens the index to write, and no segment
    with forebay.Cache(root, **({"read_only": True} if is_reader else {})) as cache:
        samples = cache.samples("a", **options)
        counts = [right(samples, 0, 100)]
        child(fill, root, 150, 300)
        held = [samples.get(slot) for slot in range(10)]
        counts += [right(samples, 150, 300), right(samples, 150, 300), right(samples, 0, 100)]
        assert all(bytes(data) == payload(slot) for slot, data in enumerate(held))
        print(*counts, flush=True)
    with forebay.Cache(root) as cache:
        print(right(cache.samples("a", **options), 150, 300), cache.check(deep=True))


for name in ("lower", "upper", "work", "merged"):
    os.mkdir(f"{place}/{name}")
fill(f"{place}/lower/root", 0, 100)
layers = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
mounted = subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", f"{place}/merged"], capture_output=True, text=True)
if mounted.returncode:
    print("no overlay:", mounted.stderr)
else:
    child(look, f"{place}/merged/root")
"""


@pytest.mark.root
@pytest.mark.parametrize("who", ["writer", "reader"])
def test_samples_that_another_process_adds_to_a_lower_layer_are_seen_whole(quick_path: Path, who: str) -> None:
    command = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", SCRIPT, str(quick_path), who]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    if "no overlay:" in done.stdout or "unshare" in done.stderr:
        pytest.skip(f"no mount here: {done.stdout} {done.stderr}")
    counts, after = done.stdout.splitlines()
    assert (done.returncode, after) == (0, "150 []"), done.stderr
    assert counts == "100 150 150 100"
