"""A function's code is part of its identity: which changes count, which do not, and where the code is had from."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import linecache
import logging
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.tasks.code import _quiet, tree_of
from forebay.tasks.hashing import Unstable, as_own, digest_of
from forebay.tasks.naming import Code, Naming, code_of
from tests.processes import fork

BODY = """
import functools
SCALE = 2
TABLE = {"a": [1, 2]}
def helper(x):
    return x + 1
def other(x):
    return x
class Model:
    def fit(self, x):
        return x * SCALE
def f(x: int) -> int:
    '''Says nothing.'''
    # nor does this
    return helper(x) * SCALE + TABLE["a"][0]
"""


def module(text: str, path: Path, name: str = "flow") -> types.ModuleType:
    """A module with this text, imported from a file: never from bytecode, which two texts of one length and second would share."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    exec(compile(text, path, "exec", dont_inherit=True), vars(made))
    return made


@pytest.fixture
def digest(tmp_path: Path) -> Callable[..., str]:
    numbers = iter(range(1000))

    def found(text: str, name: str = "f") -> str:
        made: Any = module(text, tmp_path / f"flow{next(numbers)}.py")
        return code_of(functools.reduce(getattr, name.split("."), made))[0].digest

    return found


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'''Says nothing.'''", "'''Says\n    less.'''"),
        ("    '''Says nothing.'''\n", ""),
        ("# nor does this", "pass"),
        ('return helper(x) * SCALE + TABLE["a"][0]', 'return (helper( x )*SCALE\n        + TABLE["a"] [0])'),
        ('TABLE["a"]', "TABLE['a']"),
        ("def f(x", "\n\ndef f(x"),
        ("def other(x):\n    return x", "def other(x):\n    return -x"),
        ("SCALE = 2", "SCALE = 2  # twice"),
        ("SCALE = 2", "SCALE = 1 + 1"),
        ("    return x + 1", "    'Adds.'\n    return x + 1"),
    ],
)
def test_what_makes_no_difference(digest: Callable[..., str], old: str, new: str) -> None:
    assert BODY.count(old) == 1
    assert digest(BODY) == digest(BODY.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return helper(x) * SCALE + ", "return helper(x) * SCALE - "),
        ("(x: int)", "(x: int, y=1)"),
        ("SCALE = 2", "SCALE = 3"),
        ("SCALE = 2", "SCALE = 2.0"),
        ('{"a": [1, 2]}', '{"a": [1, 3]}'),
        ("return x + 1", "return x + 2"),
        ("def f(x", "@functools.lru_cache\ndef helper(x):\n    return x - 1\ndef f(x"),
    ],
)
def test_what_makes_another_function(digest: Callable[..., str], old: str, new: str) -> None:
    assert BODY.count(old) == 1
    assert digest(BODY) != digest(BODY.replace(old, new))


def test_methods_partials_and_objects_have_the_code_of_what_runs(digest: Callable[..., str]) -> None:
    text = (
        BODY
        + "bound = Model().fit\npart = functools.partial(f, 1)\nobj = type('Obj', (), {'__call__': f})()\nquick = functools.lru_cache(f)\n"
    )
    assert digest(text, "Model.fit") == digest(text, "bound") != digest(text)
    assert digest(text) == digest(text, "part") == digest(text, "obj") == digest(text, "quick")
    assert digest(text, "Model.fit") != digest(text.replace("return x * SCALE", "return x / SCALE"), "Model.fit")
    assert digest("from math import sin", "sin") == ""


DECORATED = """
import functools
def times(n, wraps):
    def decorate(fn):
        def wrapper(*args):
            return fn(*args) * n
        return functools.wraps(fn)(wrapper) if wraps else wrapper
    return decorate
@times(2, {wraps})
def f(x):
    return x{rest}
"""


TWICE = """
import functools
def times(n):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args) * n
        return wrapper
    return decorate
@times({})
@times(2)
def helper(x):
    return x
def f(x):
    return helper(x)
"""


def test_what_the_decorators_of_a_helper_are_given_counts(digest: Callable[..., str]) -> None:
    texts = [TWICE.format(1), TWICE.format(3), TWICE.format(1).replace("times(2)", "times(3)")]
    assert len({digest(text) for text in texts}) == 3
    assert digest(texts[0]) == digest(texts[0])


def test_what_an_inner_decorator_is_given_counts(tmp_path: Path) -> None:
    text = TWICE.replace("helper(x):", "g(x):")
    made: list[Any] = [module(text.format(1).replace("times(2)", f"times({n})"), tmp_path / f"{n}.py") for n in (2, 3)]
    again: Any = module(text.format(1), tmp_path / "again.py")
    assert as_own(made[0].g) == as_own(again.g) != as_own(made[1].g)


def test_the_defaults_of_a_function_that_is_closed_over_count() -> None:
    def made(n: int) -> Any:
        def inner(x: int, by: int = n) -> int:
            return x * by

        return lambda x: inner(x)

    assert as_own(made(2)) == as_own(made(2)) != as_own(made(3))


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("def __h(x):\n    return x + 1\ndef f(x):\n    return __h(x)\n", "+ 1", "+ 2"),
        ("N = 1\ndef h(x, n=N):\n    return x + n\ndef f(x):\n    return h(x)\n", "N = 1", "N = 2"),
        ("N = 1\ndef h(x, *, n=N):\n    return x + n\ndef f(x):\n    return h(x)\n", "N = 1", "N = 2"),
        ("N = 1\nA = {'a': [N, -N]}\ndef f(x):\n    return A[x]\n", "N = 1", "N = 2"),
        ("A = [1] * 3\ndef f(x):\n    return A[x]\n", "[1]", "[2]"),
        ("A = [x * 2 for x in (1, 2)]\ndef f(x):\n    return A[x]\n", "x * 2", "x * 3"),
        ("A = {'a': 1, 'b': 2}\ndef f(x):\n    return list(A)\n", "'a': 1, 'b': 2", "'b': 2, 'a': 1"),
        ("B = {'a': 1}\nA = {**B, 'b': 2}\ndef f(x):\n    return A\n", "'a': 1", "'a': 3"),
        ("B = {'a': 1}\nA = {**B, 'b': 2}\ndef f(x):\n    return A\n", "'b': 2", "'b': 3"),
        ("B = [1]\nA = {'x': B, 'b': 2}\ndef f(x):\n    return A\n", "[1]", "[3]"),
        ("B = []\nA = {'x': B, 'b': 2}\ndef f(x):\n    return A\n", "2", "3"),
        ("B = [1]\nA = [*B, 2]\ndef f(x):\n    return A\n", "[1]", "[3]"),
        ("B = [1]\nA = [*B, 2]\ndef f(x):\n    return A\n", "2", "3"),
        ("B = [1]\nA = (*B, 2)\ndef f(x):\n    return A\n", "[1]", "[3]"),
        ("C = [1]\nB = {'c': C, 'd': [*C]}\nA = [B, C, *B]\ndef f(x):\n    return A\n", "[1]", "[2]"),
    ],
)
def test_what_a_function_reaches_by_a_name_counts(digest: Callable[..., str], text: str, old: str, new: str) -> None:
    assert digest(text) == digest(text) != digest(text.replace(old, new))


def test_what_other_modules_give_counts_in_a_list_and_as_a_default(digest: Callable[..., str]) -> None:
    for rest in ("A = [pi]\ndef f(x):\n    return A\n", "def h(x, a=pi):\n    return x\ndef f(x):\n    return h(x)\n"):
        assert digest("from math import pi\n" + rest) != digest("from math import tau as pi\n" + rest)


def test_what_calls_gave_counts_neither_as_a_default_nor_within_a_list(digest: Callable[..., str]) -> None:
    """Else each process would have another function."""
    text = "import time\nNOW = time.time_ns()\nA = [NOW]\ndef h(x, now=time.time_ns(), then=NOW):\n    return x\n"
    text += "B = [*A]\nC = {'a': A, 'b': 1}\nD = (*A,)\n"
    for names in ("h(x), A", "A, B, C, D"):
        found = f"{text}def f(x):\n    return {names}\n"
        assert digest(found) == digest(found)


def test_what_is_unpacked_of_a_set_counts_in_no_order(digest: Callable[..., str]) -> None:
    """Each process has another one."""
    text = "{}B = [*S, 1]\ndef f(x):\n    return B\n"
    assert digest(text.format("S = {'a', 'b'}\n")) == digest(text.format("S = {'c', 'd'}\n"))
    assert digest(text.format("").replace("S", "{'a', 'b'}")) == digest(text.format("").replace("S", "{'c', 'd'}"))


@pytest.mark.parametrize("wraps", [True, False])
def test_what_a_decorator_wraps_counts_and_so_does_the_wrapper(digest: Callable[..., str], wraps: bool) -> None:
    first, other = (DECORATED.format(wraps=wraps, rest=rest) for rest in ("", " + 1"))
    assert digest(first) == digest(first) != digest(other)
    assert digest(first) != digest(first.replace(" * n", " ** n"))
    first = first.replace("return x", "return TABLE[x]") + "TABLE = [1, 2]\n"  # of what is wrapped, not of the wrapper
    assert digest(first) != digest(first.replace("[1, 2]", "[1, 3]"))


def test_lambdas_on_one_line_are_told_apart(digest: Callable[..., str]) -> None:
    text = "f, g, h = lambda x: x + 1, lambda x: x + 2, lambda x: (lambda y: y + x)"
    assert len({digest(text), digest(text, "g"), digest(text, "h")}) == 3
    assert digest(text) == digest("f = (\n    lambda x:  # one\n    x + 1)") == digest("f = lambda x: x + 1  # two")
    assert digest_of(eval("lambda x: x + 1")) == digest_of(eval("lambda x: x + 1")) != digest_of(eval("lambda x: x + 2"))


def test_what_a_call_gave_is_no_constant(digest: Callable[..., str]) -> None:
    """Else each process would have another function."""
    text = "import os, time\nBEGAN = time.time_ns()\nPID = os.getpid()\nCOUNT = 0\ndef f(x):\n    return BEGAN, PID, COUNT\n"
    text += "def g():\n    global COUNT\n    COUNT += 1\n"
    assert digest(text) == digest(text)
    assert digest(text.replace("COUNT = 0", "COUNT = 5")) == digest(text)


def test_a_list_that_was_changed_meanwhile_does_not_count(tmp_path: Path) -> None:
    made: Any = module("LIST = [1]\ndef f():\n    return LIST\n", tmp_path / "flow.py")
    first = code_of(made.f)[0].digest
    made.LIST.append(2)
    assert code_of(made.f)[0].digest not in (first, "")


def test_what_names_a_list_that_was_changed_meanwhile_does_not_count(tmp_path: Path) -> None:
    one, two = (f"LIST = [1]\nTABLE = {{'a': LIST, 'b': {n}}}\nALL = [*LIST, {n}]\ndef f():\n    return TABLE, ALL\n" for n in (2, 3))
    made: list[Any] = [module(text, tmp_path / f"flow{number}.py") for number, text in enumerate((one, two))]
    for each in made:
        each.LIST.append(2)
    assert code_of(made[0].f)[0] == code_of(made[1].f)[0]


def test_lists_that_lead_to_each_other_do_not_count(tmp_path: Path) -> None:
    made: Any = module("ONE = [lambda: TWO]\nTWO = [ONE, 1]\nTHREE = [1, TWO]\ndef f():\n    return ONE, THREE\n", tmp_path / "flow.py")
    assert code_of(made.f)[0].digest


def test_a_constant_counts_as_it_is_at_the_call(tmp_path: Path) -> None:
    made: Any = module("for lr in (1, 2, 1):\n    pass\ndef f():\n    return lr\n", tmp_path / "flow.py")
    naming = Naming(made.f, "t")
    keys = []
    for made.lr in (1, 2, 1):
        keys.append(naming.tag_of((), {}).key)
    assert keys[0] == keys[2] != keys[1]


def test_a_function_among_the_arguments_counts_with_its_code(tmp_path: Path) -> None:
    one, two = (module(f"def loss(x):\n    return x * {n}\n", tmp_path / f"{n}.py") for n in (1, 2))
    again = module("def loss(x):\n    # the same\n    return x * 1\n", tmp_path / "3.py")
    assert digest_of(one.loss) == digest_of(again.loss) != digest_of(two.loss)
    assert digest_of(textwrap.dedent) == digest_of(textwrap.dedent) != digest_of(textwrap.indent)


class Proxy:
    """As some packages have them: it stands for what is there now, and nothing is."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("working outside of a context")

    def __bool__(self) -> bool:
        raise RuntimeError("working outside of a context")


def test_odd_objects_break_no_call(tmp_path: Path) -> None:
    made: Any = module("from unittest.mock import call\nPROXY = [1]\ndef f():\n    return call, PROXY\n", tmp_path / "flow.py")
    first = code_of(made.f)[0].digest
    made.PROXY = Proxy()
    assert code_of(made.f)[0].digest not in (first, "")
    proxy = Proxy()
    assert Naming(lambda: proxy, "t").call((), {}) is not None


def test_a_number_of_many_digits_is_a_constant_as_any(digest: Callable[..., str]) -> None:
    large = hex(1 << 20_000)
    texts = [f"def f(x):\n    return x & {large}{n}, x in {{{large}, 1}}\n" for n in (1, 2)]
    assert digest(texts[0]) == digest(texts[0]) != digest(texts[1])


def test_code_that_cannot_be_told_lets_the_call_run_uncached(
    cache: forebay.Cache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("no code")

    def double(x: int) -> int:
        return x * 2

    monkeypatch.setattr("forebay.tasks.naming.code_of", fails)
    for tag in (None, "t"):
        cached = cache.tasks("flow").cached(double, tag=tag)
        with caplog.at_level(logging.WARNING, "forebay.tasks"):
            assert [cached(1), cached(1)] == [2, 2]
        assert [r.getMessage().partition("runs uncached: ")[2] for r in caplog.records] == [
            "its code (ValueError: no code) has no content that stays: give a version"
        ]
        with pytest.raises(forebay.errors.ConfigError, match="give a version"):
            cached.tag_of(1)
        assert Naming(double, tag).call((1,), {}) is None
        assert pickle.loads(pickle.dumps(Naming(textwrap.dedent, tag))).identity == "textwrap.dedent"
        with pytest.raises(Unstable):
            digest_of(cached)
        caplog.clear()
    assert cache.tasks("flow").cached(double, version=1)(2) == 4
    assert len(cache.tasks("flow").keys()) == 1


# -- where it is had from ----------------------------------------------------------------------------------------------


def test_a_file_that_was_edited_since_is_not_believed(tmp_path: Path) -> None:
    """The old code runs: what it gives must not be found by those who run the new one."""
    text = "def f(x):\n    return x + 1\n"
    old = module(text, tmp_path / "flow.py")
    new = module(text.replace("1", "2"), tmp_path / "flow.py")
    assert code_of(old.f)[0].digest != code_of(new.f)[0].digest
    (tmp_path / "flow.py").unlink()
    assert code_of(module(text, tmp_path / "again.py").f)[0].digest not in (code_of(old.f)[0].digest, "")


def test_without_a_source_the_bytecode_counts() -> None:
    def made(text: str) -> Any:
        found: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<string>", "exec"), found)
        return code_of(found["f"])[0].digest

    assert made("def f(x): return x") == made("\ndef f(x):\n  return x") != made("def f(x): return -x")
    assert made("N = 1\ndef f(x): return N") != made("N = 2\ndef f(x): return N")


def test_a_cell_of_a_notebook_has_its_source() -> None:
    """IPython puts it where `linecache` finds it; the constant lies in another cell."""
    found: dict[str, Any] = {"__name__": "__main__"}

    def run(number: int, text: str) -> str:
        name = f"<cell {number}>"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        exec(compile(text, name, "exec"), found)
        return code_of(found["f"])[0].digest if "f" in found else ""

    run(1, "N = 1")
    first = run(2, "def f(x):\n    return x + N\n")
    assert first == run(3, "def f(x):\n    # told\n    return x + N\n") != run(4, "def f(x):\n    return x - N\n")
    run(5, "N = 2")
    assert first != run(6, "def f(x):\n    return x + N\n")


def test_who_sends_a_function_tells_its_code(tmp_path: Path) -> None:
    made = module(BODY, tmp_path / "flow.py")
    code = code_of(made.f)[0]
    assert code_of(made.f, Code("told", code.mark, code.names))[0].digest == "told"
    assert code_of(made.f, Code("told", "another", code.names))[0].digest == code.digest
    made.SCALE = 3  # type: ignore[attr-defined]
    assert code_of(made.f, Code("told", code.mark, code.names))[0].digest not in ("told", code.digest)


def test_who_sends_a_function_is_not_believed_where_a_list_differs(tmp_path: Path) -> None:
    """What the old text's worker gave would be found under the new one's name, and the other way round."""
    sent = code_of(module(BODY, tmp_path / "old.py").f)[0]  # type: ignore[attr-defined]
    assert code_of(module(BODY, tmp_path / "same.py").f, Code("told", sent.mark, sent.names))[0].digest == "told"  # type: ignore[attr-defined]
    edited: Any = module(BODY.replace("[1, 2]", "[1, 3]"), tmp_path / "new.py")
    assert code_of(edited.f, sent)[0] == code_of(edited.f)[0] != sent


@pytest.mark.parametrize(("old", "new"), [("times(2)", "times(3)"), ("def helper(x)", "def helper(x, y=1)")])
def test_who_sends_a_function_is_not_believed_where_a_helper_differs(tmp_path: Path, old: str, new: str) -> None:
    sent = code_of(module(TWICE.format(1), tmp_path / "old.py").f)[0]  # type: ignore[attr-defined]
    assert code_of(module(TWICE.format(1), tmp_path / "same.py").f, sent)[0] is sent  # type: ignore[attr-defined]
    edited: Any = module(TWICE.format(1).replace(old, new), tmp_path / "new.py")
    assert code_of(edited.f, sent)[0] == code_of(edited.f)[0] != sent


def test_a_child_that_is_forked_while_a_source_is_compiled_has_its_own_lock_and_warnings(tmp_path: Path) -> None:
    made: Any = module("def f():\n    return 1\n", tmp_path / "flow.py")
    before, inside, done = list(warnings.filters), threading.Event(), threading.Event()

    def compile_for_long() -> None:
        with _quiet():
            inside.set()
            done.wait()

    thread = threading.Thread(target=compile_for_long)
    thread.start()
    inside.wait()
    try:
        child = fork(lambda: (warnings.filters == before, code_of(made.f)[0].digest, warnings.filters == before))
        restored, digest, kept = child.result()
    finally:
        done.set()
        thread.join()
    assert (restored, digest, kept) == (True, code_of(made.f)[0].digest, True)
    assert warnings.filters == before


def test_no_syntax_trees_are_held(tmp_path: Path) -> None:
    made: Any = module(BODY, tmp_path / "flow.py")
    assert code_of(made.f)[0].digest
    gc.collect()
    assert not [thing for thing in gc.get_objects() if issubclass(type(thing), ast.stmt)]


SAMPLE = r'''
def f(a, /, b: "int" = -1, *c, d=1.5e300, **e) -> None:
    """Told."""
    x: list[int] = [*c, a if b else 1_000_000_000_000_000_000_000, b"\x00", 2j, ..., None]
    y = f"{a!r:>{b}} {{}} é\u0378 {b=} {'n'}" f"{x}" "tail"
    with open(a) as g, open(b):
        pass
    try:
        async def h(): return [i async for i in x if (z := i)]
    except* (ValueError, OSError) as error:
        raise error from None
    match x:
        case [1, *_] | {"k": str() as s, **rest} if rest: return lambda q=1: (yield)
    class C(object, metaclass=type):
        "Doc."
        v = "w"
    del x[1:2, ::3]
    return {**e, 'k': {1, 2}}
'''
SAMPLE_TREE = "0bde1f2ae06a4de0"
"""The same on each version from 3.11 on: another number is another key for each function of each user."""


def test_the_tree_is_the_same_on_each_version_of_python() -> None:
    import xxhash

    assert xxhash.xxh3_64_hexdigest(tree_of(ast.parse(SAMPLE).body[0])) == SAMPLE_TREE


OTHERS = {path for path in (shutil.which(f"python3.{n}") for n in (11, 12, 13, 14)) if path is not None and "shims" not in path}
OTHERS |= {str(path) for n in (11, 12, 13, 14) for path in Path.home().glob(f".pyenv/versions/3.{n}.*/bin/python")}
ELSEWHERE = """
import ast, sys, types
sys.modules["xxhash"] = types.ModuleType("xxhash")
sys.modules["xxhash"].__getattr__ = lambda name: None
from forebay.tasks.code import tree_of
sys.stdout.buffer.write(tree_of(ast.parse(sys.stdin.read()).body[0]))
"""


@pytest.mark.parametrize("python", sorted(OTHERS))
def test_other_versions_of_python_give_the_same_tree(python: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(forebay.__file__).parents[1]), "PYTHONUTF8": "1"}
    done = subprocess.run([python, "-c", ELSEWHERE], input=SAMPLE.encode(), capture_output=True, timeout=60, check=False, env=environment)
    if done.returncode and b"not found" in done.stderr:
        pytest.skip(f"{python} runs no Python")
    assert done.stdout == tree_of(ast.parse(SAMPLE).body[0]), done.stderr


# -- two processes -----------------------------------------------------------------------------------------------------


TRAIN = """
import logging, sys, forebay
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
cache = forebay.Cache(sys.argv[1], budget="64MiB", min_free=0)
tasks = cache.tasks("flow")

@tasks.cached{how}
def features(split):
    print("ran", end=" ")
    return {body}

print(features("train"), features("train"))
"""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Runs a script called train.py, in a process of its own; gives what it printed, and what it logged."""

    def run(body: str, where: str = "a", how: str = "", also: str = "") -> tuple[str, str]:
        script = tmp_path / where / "train.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(TRAIN.format(body=body, how=how) + also)
        command = [sys.executable, str(script), str(tmp_path / "root")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return run


@pytest.mark.parametrize("how", ["", "(tag='features-{split}')"])
def test_two_scripts_of_one_name_have_results_of_their_own(train: Callable[..., tuple[str, str]], how: str) -> None:
    assert train("'a'", "a", how)[0] == "ran a a"
    assert train("'b'", "b", how)[0] == "ran b b"
    assert train("'a'", "a", how)[0] == "a a"
    assert train("'b'", "b", how)[0] == "b b"


def test_a_changed_body_runs_again_and_says_so_once(train: Callable[..., tuple[str, str]]) -> None:
    message = "train.features: its code has changed since its outputs were stored: it runs again"
    assert message not in train("1")[1]
    printed, logged = train("2", also="features('test')\n")
    assert printed == "ran 2 2\nran"
    assert logged.count(message) == 1
    assert train("2  # a remark")[0] == "2 2"
    assert message not in train("2", also="features('other')\n")[1]
    assert train("1") == ("1 1", "")  # back again: it is still there


def test_a_version_stands_for_the_code(train: Callable[..., tuple[str, str]]) -> None:
    assert train("1", how="(version=7)")[0] == "ran 1 1"
    assert train("2", how="(version=7)") == ("1 1", "")
    assert train("2", how="(version=8)") == ("ran 2 2", "")


def test_what_other_code_gave_is_told_at_info(cache: forebay.Cache, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    one, two = (module(f"def f(x):\n    return x + {n}\n", tmp_path / f"{n}.py") for n in (1, 2))
    tasks = cache.tasks("flow")
    with caplog.at_level(logging.INFO, "forebay"):
        assert [tasks.cached(one.f)(0), tasks.cached(two.f)(0), tasks.cached(one.f)(0), tasks.cached(two.f, version=1)(0)] == [1, 2, 1, 2]
    assert [(r.levelname, "code has changed" in r.getMessage()) for r in caplog.records] == [("INFO", True)]
