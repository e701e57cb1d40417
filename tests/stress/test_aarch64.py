"""Forebay on aarch64, which qemu makes of this machine: there, numbers of system calls, flags of `open` and structures of the C library are
others. In which order stores arrive, it does not show: qemu keeps the order of the machine that it runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HERE, SRC

pytestmark = [pytest.mark.stress, pytest.mark.root, pytest.mark.timeout(900)]

VERSION = "3.11"  # of the Python of this Debian
NEEDED = ("xxhash", "pycurl", "click", "rich", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy")
# What qemu shows otherwise: itself as the first argument of a process, its own directory as "/", and no holders of locks.
OTHERS = ("described_without_its_arguments", "topmost_or_the_current", "hides_no_holder", "comes_from_the_kernel")

USE = """
import os, signal, sys
import forebay
from forebay._kernel import fences

assert not fences._IS_ORDERED
cache = forebay.Cache(sys.argv[1], budget=64 << 20, min_free=0)
assert cache.put("small", b"small") and cache.put("large", b"large" * 100_000)


def work(number):
    with cache.samples("items", length=30, codec="raw", fingerprint="1") as samples:
        for n in range(30):
            assert cache.put(f"{number} {n}", bytes([n]) * 30_000 * (n % 5))
            assert samples.get_or_put(n, lambda: bytes([n]) * 1000) == bytes([n]) * 1000
            assert cache.get("small") == b"small" and len(cache.get("large")) == 500_000
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


children = []
for number in range(4):
    children.append(os.fork())
    if not children[-1]:
        try:
            work(number)
            os._exit(0)
        finally:
            os._exit(1)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0, -signal.SIGKILL]
assert cache.check(deep=True) == []
with forebay.claim(["set"], world=forebay.World(num_nodes=1, ranks_per_node=1, workers_per_rank=1, worker=0), job="one") as claim:
    with claim.lock("lock"):
        pass
    claim.barrier("all").wait(1)
print("whole")
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a Debian for aarch64, with Python and what the tests need."""
    for program in ("debootstrap", "qemu-aarch64-static"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{program}: not installed")
    top = tmp_path_factory.mktemp("aarch64")
    how = ["--foreign", "--arch=arm64", "--variant=minbase", "--include=python3,python3-distutils"]
    subprocess.run(["debootstrap", *how, "bookworm", top], check=True, stdout=subprocess.DEVNULL)
    for package in (top / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, top], check=True)
    wheels = ["--only-binary=:all:", "--python-version", VERSION, "--implementation", "cp"]
    for platform in ("manylinux2014_aarch64", "manylinux_2_28_aarch64", "any"):
        wheels += ["--platform", platform]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", "--target", top / "site", *wheels, *NEEDED], check=True
    )
    return top


def python(machine: Path, *arguments: str | Path) -> str:
    """What this Python prints there. A process that it forks is one of that machine, too; it can start no other program."""
    path = f"PYTHONPATH={SRC}:{machine / 'site'}"
    command = ["qemu-aarch64-static", "-L", machine, "-E", path, machine / f"usr/bin/python{VERSION}", *arguments]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_processes_share_a_cache_and_one_is_killed(machine: Path, tmp_path: Path) -> None:
    assert python(machine, "-c", USE, tmp_path / "root").endswith("whole\n")


def test_what_asks_the_kernel_is_answered(machine: Path, tmp_path: Path) -> None:
    options = ["--quick", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "there"]
    chosen = " and ".join(f"not {name}" for name in OTHERS)
    assert " passed" in python(machine, "-m", "pytest", *options, "-k", chosen, "tests/kernel")
