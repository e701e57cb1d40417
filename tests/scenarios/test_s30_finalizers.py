"""Scenario 30: finalizers take no lock that they might wait for, and raise nothing at the interpreter's exit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts
from tests.items import Ring, by_threads

MiB = 1 << 20


@pytest.mark.rotates
@pytest.mark.parametrize("seconds", [4, pytest.param(parts.share(60), marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
def test_s30_leases_dropped_by_many_threads(seconds: int, root: Path, server: ScriptedServer, collecting: None) -> None:
    bodies = [os.urandom(200_000 + i) for i in range(12)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]
    done = [0] * 6

    def work(number: int, choose: random.Random) -> None:
        i = choose.randrange(12)
        Ring(cache.local(urls[i]))
        file = cache.open(urls[i])
        assert file.read(10) == bodies[i][:10]
        Ring(file)
        del file
        assert cache.read(urls[i]) == bodies[i]
        cache.put(str(choose.randrange(20)), bodies[i])
        done[number] += 1

    with forebay.Cache(root, budget=2 << 20) as cache:
        by_threads(work, len(done), seconds)
        assert all(done)
        cache.get("nothing")
        assert not any(entry.leased for entry in cache.entries())
        assert len(cache.clear().execute().spared) == 0


THREADS = "import threading; "
EXITS = {
    "leases and files": "held = [cache.local(url), cache.open(url), cache.read(url)]",
    "a ring": "ring = [cache.local(url)]; ring.append(ring)",
    "a module": "import os; os.held = cache.local(url)",
    "a thread that had one": THREADS + "t = threading.Thread(target=lambda: held.append(cache.local(url))); held = []; t.start(); t.join()",
    "a daemon that goes on": THREADS
    + "cache.read(url); threading.Thread(target=lambda: [cache.local(url) for _ in iter(int, 1)], daemon=True).start()",
    "__del__": "K = type('K', (), {'__del__': lambda self: self.lease.close()}); k = K(); k.lease = cache.local(url)",
    "an exception": "held = cache.local(url); sys.exit(0)",
}


@pytest.mark.parametrize("what", EXITS)
def test_s30_the_interpreter_exits_with_leases_held(root: Path, server: ScriptedServer, run: Callable[..., Any], what: str) -> None:
    url = server.put("/x.bin", os.urandom(2 * MiB))
    script = f"import sys, forebay\ncache = forebay.Cache(sys.argv[1])\nurl = sys.argv[2]\n{EXITS[what]}\n"
    done = run(script, root, url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with forebay.Cache(root) as cache:
        assert cache.evict(url).removed == (url,)
