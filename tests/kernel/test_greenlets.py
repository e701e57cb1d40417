"""Programs that gevent or eventlet has patched, before Forebay was imported or after."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forebay.testing import ScriptedServer

BEFORE = "import warnings; warnings.simplefilter('ignore')\n"
IMPORTS = "import forebay, forebay.cache, forebay.fetch.pipeline, forebay.remote.http.loop\n"
PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(60, exit=True)
url, root = sys.argv[1:]
import forebay, gevent
cache = forebay.Cache(root, budget="100MB")
ticks = []
gevent.spawn(lambda: [(ticks.append(1), gevent.sleep(0.005)) for _ in range(10_000)])
assert len(cache.read(url + "/slow")) == 1000
assert len(ticks) > 3, "no other greenlet went on"
def make():
    gevent.sleep(0.05)
    return b"made"
assert [bytes(job.get()) for job in [gevent.spawn(cache.get_or_put, "key", make) for _ in range(5)]] == [b"made"] * 5
assert [len(job.get()) for job in [gevent.spawn(cache.read, f"{url}/{n}") for n in range(10)]] == [1000] * 10
assert [len(job.get()) for job in [gevent.spawn(cache.read, url + "/large") for n in range(3)]] == [20_000_000] * 3
assert [len(each) for each in cache.read_many([f"{url}/{n}" for n in range(10, 20)])] == [1000] * 10
assert all(job.get() for job in [gevent.spawn(cache.put, f"p{n}", b"x" * 100_000) for n in range(20)])
print("done")
"""
FORKS = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(60, exit=True)
url, root = sys.argv[1:]
import forebay, gevent
cache = forebay.Cache(root, budget="100MB")
assert len(cache.read(url + "/1")) == 1000
pid = os.fork()
if not pid:
    gevent.sleep(0.05)
    assert len(cache.read(url + "/1")) == len(cache.read(url + "/2")) == 1000
    os._exit(0)
assert os.waitpid(pid, 0) == (pid, 0)
assert len(cache.read(url + "/3")) == 1000
print("done")
"""
REFUSED = """
import faulthandler, sys
faulthandler.dump_traceback_later(60, exit=True)
import forebay
try:
    forebay.Cache(sys.argv[2], budget="100MB")
except forebay.errors.ConfigError as error:
    print("done" if "patched" in str(error) else error)
"""


def needs(library: str) -> None:
    """Skip without this library. Here it is not imported: eventlet would warn of every later fork of this process."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def run(program: str, root: Path) -> None:
    with ScriptedServer() as server:
        for n in range(20):
            server.put(f"/{n}", b"q" * 1000)
        server.put("/large", b"q" * 20_000_000)
        server.put("/slow", b"q" * 1000, latency=0.2)
        done = subprocess.run([sys.executable, "-c", program, server.url, root], capture_output=True, text=True, timeout=100)
    assert (done.stdout, "loop of HTTP" in done.stderr) == ("done\n", False), done.stderr


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("left", ["", "select", "time", "socket", "queue", "os"])
def test_greenlets_go_on_while_others_use_the_cache(tmp_path: Path, left: str, is_imported: bool) -> None:
    needs("gevent")
    patch = f"from gevent import monkey; monkey.patch_all({left and left + '=False'})\n"
    run(BEFORE + (IMPORTS if is_imported else "") + patch + PROGRAM, tmp_path / "root")


def test_a_fork_beside_the_greenlet_that_transfers(tmp_path: Path) -> None:
    needs("gevent")
    run(BEFORE + "from gevent import monkey; monkey.patch_all()\n" + FORKS, tmp_path / "root")


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("patch", ["import eventlet; eventlet.monkey_patch()", "from gevent import monkey; monkey.patch_all(thread=False)"])
def test_a_cache_that_would_stop_all_greenlets_is_not_opened(tmp_path: Path, patch: str, is_imported: bool) -> None:
    needs("eventlet" if "eventlet" in patch else "gevent")
    run(BEFORE + (IMPORTS if is_imported else "") + patch + "\n" + REFUSED, tmp_path / "root")
