"""Scenario 21: one setting moves everything: nothing is written outside of the root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer

SCRIPT = """
import os, sys, threading
import forebay
root = sys.argv[1] if sys.argv[1] != "-" else None
with forebay.Cache(root) as cache:
    for url in sys.argv[2:]:
        cache.read(url)
        with cache.local(url), cache.open(url):
            pass
    cache.put("small", b"v")
    cache.put("large", bytes(2 << 20))
    cache.get_or_put("other", lambda: b"v")
    pid = os.fork()
    if pid == 0:
        cache.read(sys.argv[2], refresh=True)
        cache.put("of the child", bytes(50_000))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    cache.evict("values:large")
    cache.check(deep=True)
    cache.repair()
"""
CALLS = "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mknod,mknodat,truncate"
WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_TMPFILE")


def written(trace: Path) -> set[str]:
    """Every path that a call of the trace would change."""
    found = set()
    for line in trace.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if call is None or (call[1] in ("open", "openat") and not WRITES.search(line)):
            continue
        found |= {path for path in re.findall(r'"((?:[^"\\]|\\.)*)"', line) if path.startswith("/")}
    return found


@pytest.mark.parametrize("by", ["argument", "FOREBAY_HOME", "XDG_CACHE_HOME", "command line"])
def test_s21_every_write_is_below_the_root(root: Path, tmp_path: Path, server: ScriptedServer, by: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    urls = [server.put(f"/{i}.bin", os.urandom(100_000)) for i in range(3)]
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "FOREBAY_", "TMP"))}
    environ |= {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    place = root
    if by == "FOREBAY_HOME":
        environ[by] = str(root)
    elif by == "XDG_CACHE_HOME":
        environ[by] = str(root)
        place = root / "forebay"
    job = ["-c", SCRIPT, str(root) if by == "argument" else "-", *urls]
    if by == "command line":
        job = ["-m", "forebay.cli", "pull", "--root", str(root), *urls]
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-s", "4096", "-e", f"trace={CALLS}", "-o", str(trace)]
    done = subprocess.run([*strace, sys.executable, *job], env=environ, capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr.lower() and "not permitted" in done.stderr:
        pytest.skip("strace is not permitted here")
    assert done.returncode == 0, done.stderr
    paths = written(trace)
    assert any(path.startswith(f"{place}/") for path in paths)
    outside = {path for path in paths if not f"{path}/".startswith(f"{place}/") and path != str(root)}
    assert outside - {"/dev/null", "/dev/tty"} == set()
    assert list(home.iterdir()) == []
    if by == "XDG_CACHE_HOME":
        with forebay.Cache(place) as cache:
            assert cache.check(deep=True) == []
