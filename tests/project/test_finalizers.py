"""What is collected while the interpreter goes down: nothing of ours is printed, whatever still refers to what."""

from __future__ import annotations

import ast
import builtins
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.testing import ScriptedServer
from tests.project.test_layering import MODULES

BUILTIN = set(dir(builtins))


def uses_globals(function: ast.FunctionDef) -> set[str]:
    """Names that a finalizer looks up in its module, which may be empty by then. Defaults are looked up when it is made."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    known = {argument.arg for argument in arguments} | BUILTIN
    inside = [node for statement in function.body for node in ast.walk(statement)]
    known |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    annotations = {id(node) for a in inside if isinstance(a, ast.AnnAssign) for node in ast.walk(a.annotation)}
    return {node.id for node in inside if isinstance(node, ast.Name) and node.id not in known and id(node) not in annotations}


def guards_itself(function: ast.FunctionDef) -> bool:
    """Whether it asks, by a name that was bound when it was made, if the interpreter goes down, before anything else."""
    defaults = {ast.unparse(default) for default in function.args.defaults}
    first = next(node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)))
    return "sys.is_finalizing" in defaults and isinstance(first, ast.If) and "is_finalizing()" in ast.unparse(first.test)


def is_finalizer(function: ast.FunctionDef) -> bool:
    """Whether the garbage collector calls it: `Desk._gone` is called for a weak reference."""
    return function.name == "__del__" or (function.name == "_gone" and "mark" in {argument.arg for argument in function.args.args})


@functools.cache
def shared_finalizers() -> set[str]:
    """Functions that are the finalizers of several classes: they guard themselves, and find nothing in their module."""
    functions = [node for path in MODULES.values() for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if one.args.defaults and guards_itself(one) and not uses_globals(one)}


def breaches(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        is_named = isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__del__" for target in node.targets)
        if is_named and ast.unparse(node.value) not in shared_finalizers():
            found.append(f"{node.lineno}: __del__ is another method, with what that uses")
        if (
            isinstance(node, ast.FunctionDef)
            and node.name in ("__del__", "_gone")
            and is_finalizer(node)
            and not guards_itself(node)
            and uses_globals(node)
        ):
            found.append(f"{node.lineno}: {node.name} uses {uses_globals(node)}")
        if isinstance(node, ast.FunctionDef) and node.name == "__del__" and not guards_itself(node) and "self.close(" in ast.unparse(node):
            found.append(f"{node.lineno}: __del__ calls what may use the module")
    return found


@pytest.mark.rotates
def test_no_finalizer_relies_on_its_module() -> None:
    assert {module: found for module, path in MODULES.items() if (found := breaches(path.read_text()))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n def __del__(self): os.close(self.fd)",
        "class A:\n def close(self): pass\n __del__ = close",
        "class A:\n def __del__(self): self.close()",
        "class A:\n def __del__(self):\n  if not sys.is_finalizing(): self.close()",
    ],
)
def test_the_lint_sees(code: str) -> None:
    assert breaches(code) != []


HEAD = """
import sys, os, multiprocessing, forebay
from forebay import Cache
URL, ROOT = {url!r}, {root!r}
kept = []
sys.excepthook = lambda *args: print(kept)  # refers to __main__, whose variables go after those of our modules
"""
SOURCE = "from forebay.sources import UrlSource; p = cache.prefetcher(UrlSource(URL.rpartition('/')[0] + '/')); "
FRONTS = {
    "a lease": "kept += [cache.local(URL), cache]",
    "a closed cache": "kept += [cache.local(URL)]; cache.close()",
    "bytes": "kept += [cache.read(URL)]",
    "an open file": "kept += [cache.open(URL)]",
    "a held key": "kept += [cache.space('x'), cache.get_or_put('k', lambda: b'v')]",
    "samples": "s = cache.samples('a', 10); s.put(1, b'x' * 5000); kept += [s, s.get(1)]",
    "samples without a name": "s = cache.samples(None, 10); s.put(1, b'x' * 5000); kept += [s]",
    "outputs": "t = cache.tasks('flow'); f = t.cached(lambda x: x, version='1'); f(3); kept += [t, f]",
    "a prefetcher": SOURCE + "l = p.get_lazy('x.bin'); kept += [p, l, l.get()]",
    "lazies of a prefetcher": SOURCE + "kept += [p, p.get_lazy('x.bin')]",
    "spilled objects": SOURCE + "kept += [p, p.put([1, 2, 3])]",
    "a claim": "os.environ['FOREBAY_CLAIMS'] = ROOT + '-claims'; c = cache.claim([ROOT + '-out'], job='j'); kept += [c, c.barrier('b')]",
}
PLACES = {
    "here": "cache = Cache(ROOT, budget='64MiB', min_free=0)\n{use}\n",
    "a forked child": (
        "cache = Cache(ROOT, budget='64MiB', min_free=0)\n{use}\n"
        "p = multiprocessing.get_context('fork').Process(target=lambda: kept.append(kept))\np.start(); p.join()\n"
        "pid = os.fork()\nif not pid:\n    sys.exit(0)\nos.waitpid(pid, 0)\n"
    ),
}


@pytest.mark.rotates
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("front", FRONTS)
def test_a_late_reference_prints_nothing(front: str, place: str, tmp_path: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", bytes(300_000))
    code = HEAD.format(url=url, root=str(tmp_path / "root")) + PLACES[place].format(use=FRONTS[front])
    words = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code]  # Python 3.12 and later, of each fork
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


PROGRAM = """
import logging, multiprocessing, os, sys
import forebay

URL, ROOT, WAY = sys.argv[1:] if sys.argv[1:] else os.environ["JOB"].split()


def work():
    cache = forebay.Cache(ROOT, budget="64MiB", min_free=0)
    samples = cache.samples(None, 10)
    samples.put(1, b"x" * 5000)
    kept = [cache, cache.local(URL), cache.open(URL), samples, samples.get(1)]
    {holder}


if __name__ == "__main__":
    if WAY == "spawn":
        os.environ["JOB"] = " ".join(sys.argv[1:])
        child = multiprocessing.get_context("spawn").Process(target=work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    pid = os.fork()
    if not pid:
        work()
        sys.exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize("holder", ["logging.of_mine = kept", "os.of_mine = kept", "sys.excepthook = lambda *args: print(kept)"])
def test_a_late_reference_in_a_child_prints_nothing(holder: str, way: str, tmp_path: Path, server: ScriptedServer) -> None:
    """The child makes what it refers to itself, as a data loader's worker does, and another module has it when ours is gone."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(holder=holder))
    words = [server.put("/x.bin", bytes(300_000)), str(tmp_path / "root"), way]
    done = subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


HELD = """
import builtins, sys, threading
import forebay

cache = forebay.Cache(sys.argv[1], budget="64MiB", min_free=0)
cache.put("k", b"v")
claim = forebay.claim([], world=forebay.World(1, 1, 1, 0), job="held at exit")
held = threading.Event()


class Kept:
    def __del__(self):
        cache.close()
        claim.close()


def hold():
    with cache._store.engine.parts.catalog.writer(), cache._store.engine.parts.catalog._mutex:
        held.set()
        threading.Event().wait()


builtins.kept = Kept()
threading.Thread(target=hold, daemon=True).start()
held.wait()
"""


def test_what_is_closed_at_the_end_waits_for_no_thread(tmp_path: Path) -> None:
    """Once the interpreter ends, no other thread runs, and none lets go of what it holds."""
    words = [sys.executable, "-c", HELD, str(tmp_path / "root")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "FOREBAY_CLAIMS": str(tmp_path)}
    )
    assert (done.returncode, done.stderr) == (0, "")
