"""The code of a function as bytes: its normalised syntax tree, or its bytecode if there is no source. Also which functions it wraps and
closes over, and its name.

The tree is the same on every version of Python; comments, docstrings and formatting are no part of it. A source counts only if it compiles
to the very bytecode that the function runs: a file may have been edited since it was imported, or rewritten on its way in.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import operator
import os
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forebay._kernel import host
from forebay._kernel.interrupts import guarded, unless_of_handler

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # cells of notebooks have it; elsewhere it changes nothing
_FUTURE = functools.reduce(operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)) & ~0x10
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_NO_PART = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


# -- syntax trees ------------------------------------------------------------------------------------------------------


def tree_of(node: ast.AST) -> bytes:
    """A tree without what does not count. Of a function neither its name nor its decorators."""
    out: list[str] = []
    _write(node, out, frozenset({"name", "decorator_list"}) if isinstance(node, _FUNCTIONS) else frozenset())
    return "".join(out).encode("ascii")


def _write(node: ast.AST, out: list[str], left_out: frozenset[str] = frozenset()) -> None:
    if isinstance(node, ast.JoinedStr):  # versions differ in where they cut its constants
        _write_joined(node, out)
        return
    out.append(f"{type(node).__name__}(")
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        # Fields that a version does not know yet are empty in the next.
        if name not in _NO_PART and name not in left_out and value is not None and value != []:
            out.append(f"{name}=")
            _write_value(value, out)
    out.append(")")


def _write_value(value: Any, out: list[str]) -> None:
    if isinstance(value, ast.AST):
        _write(value, out)
    elif isinstance(value, list):
        out.append("[")
        for item in value:
            if not _is_idle(item):
                _write_value(item, out)
                out.append(",")
        out.append("]")
    else:
        # Not by repr: which characters it escapes depends on the version. Large ints have no decimals.
        out.append(hex(value) if type(value) is int else ascii(value))


def _is_idle(item: Any) -> bool:
    """Whether a statement does nothing: `pass`, a docstring or another constant on its own."""
    return isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))


def _write_joined(node: ast.JoinedStr, out: list[str]) -> None:
    text = ""
    out.append("f(")
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        out.append(ascii(text) if text else "")
        text, spec = "", getattr(part, "format_spec", None)
        no_spec = isinstance(spec, ast.JoinedStr) and not spec.values
        _write(part, out, frozenset({"format_spec"}) if no_spec else frozenset())
    out.append(f"{ascii(text) if text else ''})")


# -- bytecode ----------------------------------------------------------------------------------------------------------


def shape_of(code: types.CodeType) -> bytes:
    """What a function runs, wherever its source lies: the same in each process of one version of Python."""
    known = _shapes.get(code)
    if known is None:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        consts = [_constant(value) for value in code.co_consts]
        known = repr((code.co_code, code.co_exceptiontable, counts, names, consts)).encode("utf-8", "surrogatepass")
        _shapes[code] = known
    return known


_shapes: weakref.WeakKeyDictionary[types.CodeType, bytes] = weakref.WeakKeyDictionary()


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return shape_of(value)
    if isinstance(value, tuple):
        return [_constant(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(repr(_constant(item)) for item in value)
    return hex(value) if type(value) is int else repr(value)  # large ints have no decimals


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of all within it, the innermost first."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from codes_in(value)
    yield code


def steps_of(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """The instructions of a code, by name, each with its argument."""
    # Without its constants: `dis` writes each of them out, and large ints have no decimals.
    for step in dis.get_instructions(code.replace(co_consts=(None,) * len(code.co_consts))):
        yield step.opname, str(step.argval)


# -- sources -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """What lies in one file or cell. ``functions``: by name. Of the module's variables: ``constants`` are given values without calling
    anything, and only outside of functions; ``literals`` are given a dict, list or set so, once: by name, the code of that expression."""

    functions: Mapping[str, list[_Function]]
    constants: frozenset[str]
    literals: Mapping[str, types.CodeType]

    def find(self, code: types.CodeType) -> _Function | None:
        """The source of a function; None where the source is not what it runs."""
        same = [function for function in self.functions.get(code.co_name, ()) if shape_of(function.code) == shape_of(code)]
        return max(
            same,
            key=lambda function: (function.code.co_qualname == code.co_qualname, function.code.co_firstlineno == code.co_firstlineno),
            default=None,
        )


@dataclass(frozen=True, slots=True)
class _Function:
    """``tree``: a digest of its tree, which itself would take much room; empty where it is nested too deep. ``defaults``: whether its
    defaults are given without calling anything."""

    code: types.CodeType
    tree: bytes
    defaults: bool


def _source_of(code: types.CodeType, namespace: dict[str, Any]) -> ModuleSource | None:
    """Where a function was written; None where that cannot be had. ``namespace``: its globals, to load sources in archives."""
    name = code.co_filename
    try:
        linecache.checkcache(name)
        lines = linecache.getlines(name, namespace)
        if not lines and name.startswith("<"):
            lines = inspect.findsource(code)[0]  # what was typed in, from Python 3.13 on
        return _parsed("".join(lines), name, code.co_flags & _FUTURE) if lines else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, IndexError, TypeError):
        return None


@functools.lru_cache(4)
def _parsed(text: str, name: str, flags: int) -> ModuleSource:
    with _quiet():
        tree = ast.parse(text, name)
        whole = compile(tree, name, "exec", flags=flags | _FLAGS, dont_inherit=True)
        rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        bound = {name: values for name, values in _bound(tree).items() if name not in rebound}
        varying = _varying(bound)
        constants = frozenset(name for name, values in bound.items() if all(_is_constant(value, varying) for value in values))
        called = frozenset(name for name, values in bound.items() if any(value and not _is_constant(value, varying) for value in values))
        literals = {
            key: compile(ast.Expression(value), name, "eval", flags=flags | _FLAGS, dont_inherit=True)
            for key, (value, *others) in bound.items()
            if value is not None and not others and any(isinstance(part, _DISPLAYS) for part in ast.walk(value))
            and _is_fixed(value, called, varying)
        }  # fmt: skip
    nodes: dict[tuple[str, int], list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            nodes.setdefault((getattr(node, "name", "<lambda>"), first), []).append(node)
    functions: dict[str, list[_Function]] = {}
    for code in codes_in(whole):
        written: Any = _written_at(code, nodes.get((code.co_name, code.co_firstlineno), []))
        if written is not None:
            try:
                digest = _digest(b"T" + tree_of(written))
            except RecursionError:
                digest = b""
            defaults = [value for value in (*written.args.defaults, *written.args.kw_defaults) if value is not None]
            is_fixed = all(_is_fixed(value, called, varying) for value in defaults)
            functions.setdefault(code.co_name, []).append(_Function(code, digest, is_fixed))
    return ModuleSource(functions, constants, literals)


class _Quiet:
    """Suppresses warnings while a source is compiled: they were shown when it was imported.

    Warning filters apply to the whole process, so one thread at a time sets them. A child that is forked meanwhile gets a lock of its own,
    and the filters that were set before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: warnings.catch_warnings[None] | None = None
        host.at_fork(self)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._set = warnings.catch_warnings()
            try:
                with self._set:
                    warnings.simplefilter("ignore")
                    yield
            finally:
                self._set = None

    def after_fork_child(self) -> None:
        left, self._set, self._lock = self._set, None, threading.Lock()
        if left is not None:
            with contextlib.suppress(RuntimeError):  # it was about to begin
                left.__exit__(None, None, None)


_quiet = _Quiet()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _written_at(code: types.CodeType, nodes: list[ast.AST]) -> ast.AST | None:
    """Take out the node that this code was compiled from, among functions of one name on one line. Innermost codes must come first."""
    if len(nodes) > 1:
        spans = [(line, column, end, last) for line, end, column, last in code.co_positions() if None not in (line, column, end, last)]
        spans = [span for span in spans if span[1] or span[3]]  # the first one stands for none
        nodes.sort(key=lambda node: (node.end_lineno - node.lineno, node.end_col_offset - node.col_offset))  # type: ignore[attr-defined]
        for at, node in enumerate(nodes if spans else ()):
            begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            if all(begin <= span[:2] and span[2:] <= end for span in spans):
                return nodes.pop(at)
        return None
    return nodes.pop() if nodes else None


def _bound(tree: ast.Module) -> dict[str, list[ast.expr | None]]:
    """The expressions assigned to the module's variables outside of functions; None for a value that no expression shows."""
    bound: dict[str, list[ast.expr | None]] = {}
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
            targets = [node.target]
        value: ast.expr | None = getattr(node, "value", None) if not isinstance(node, ast.For) else ast.Constant(None)
        for name in (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
            if isinstance(name.ctx, ast.Store):
                bound.setdefault(name.id, []).append(value)
        if not isinstance(node, _SCOPES):
            waiting += [child for child in ast.iter_child_nodes(node) if child not in targets]
        elif not isinstance(node, ast.Lambda):
            bound.setdefault(node.name, []).append(None)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            bound.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.alias):
            bound.setdefault((node.asname or node.name).partition(".")[0], []).append(None)
    return bound


def _varying(bound: dict[str, list[ast.expr | None]]) -> frozenset[str]:
    """The names of variables that may unpack differently in each process: results of calls, sets (their order), and what uses such."""
    assignments = [(name, value) for name, values in bound.items() for value in values if value is not None]
    varying = {name for name, value in assignments if any(isinstance(part, _VARYING) for part in ast.walk(value))}
    waiting = [(name, _names_in(value)) for name, value in assignments if name not in varying]
    before = -1
    while before != len(varying):
        before = len(varying)
        varying.update(name for name, names in waiting if not names.isdisjoint(varying))
    return frozenset(varying)


def _names_in(value: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}


def _is_constant(value: ast.expr | None, varying: frozenset[str]) -> bool:
    """Whether an expression has the same value in each process."""
    if value is None or any(isinstance(part, _CALLS) for part in ast.walk(value)):
        return False
    unpacked = [part.value for part in ast.walk(value) if isinstance(part, ast.Starred)]
    return not any(isinstance(part, _VARYING) for each in unpacked for part in ast.walk(each)) and all(
        _names_in(each).isdisjoint(varying) for each in unpacked
    )


def _is_fixed(value: ast.expr, called: frozenset[str], varying: frozenset[str]) -> bool:
    """Whether an expression calls nothing, and names no result of a call."""
    return _is_constant(value, varying) and called.isdisjoint(_names_in(value))


_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)

_CALLS = (ast.Call, ast.Attribute, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_VARYING = (*_CALLS, ast.Set, ast.SetComp)


# -- functions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Definition:
    """How a function was written. ``code``: bytes that only equal code shares. ``constants``: whether a global name is a constant of
    its module; None where the module has no source. ``literals``: see `ModuleSource`. ``defaults``: whether its defaults are constants,
    as far as is known."""

    code: bytes
    constants: frozenset[str] | None
    literals: Mapping[str, types.CodeType]
    defaults: bool


def definition_of(function: types.FunctionType) -> Definition:
    """How a function was written, as far as is known. Looked up once for each code and file."""
    code = function.__code__
    known = _known.setdefault(code, {})
    definition = known.get(code.co_filename)
    if definition is None:
        definition = known[code.co_filename] = _look_up(code, function.__globals__)
    return definition


@guarded
def _look_up(code: types.CodeType, namespace: dict[str, Any]) -> Definition:
    source = _source_of(code, namespace)
    written = source.find(code) if source is not None else None
    content = b"T" + written.tree if written is not None and written.tree else b"C" + _digest(b"C" + shape_of(code))
    if source is None or not isinstance(namespace.get("__file__"), str):  # typed in: what it names lies in other cells
        return Definition(content, None, {}, True)
    return Definition(content, source.constants & names_read_by(code), source.literals, written is None or written.defaults)


_known: weakref.WeakKeyDictionary[types.CodeType, dict[str, Definition]] = weakref.WeakKeyDictionary()


@functools.lru_cache(1024)
def names_read_by(code: types.CodeType) -> frozenset[str]:
    """The global names that a function, or one within it, reads and does not set."""
    read, stored = set(), set()
    for part in codes_in(code):
        for name, argument in steps_of(part):
            if name in _LOADS:
                read.add(argument)
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(argument)
    return frozenset(name for name in read - stored if not (name.startswith("__") and name.endswith("__")))


_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@functools.lru_cache(1024)
def is_installed(filename: str) -> bool:
    """Whether a file is of Python or of an installed package, or ours: such are known by their names."""
    return filename.startswith(_STDLIB) or not _PACKAGES.isdisjoint(filename.split(os.sep))


_STDLIB = (
    "<frozen ",
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
)
_PACKAGES = frozenset({"site-packages", "dist-packages"})


# -- functions within functions ----------------------------------------------------------------------------------------

MANY_FUNCTIONS = 100
"""Functions that make up another one, at most."""


def cells_of(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over, as far as they have a value yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except unless_of_handler(ValueError):
            continue
        yield name, content


def functions_of(function: Any) -> list[types.FunctionType]:
    """Those whose code makes up a function: itself, what it wraps and what it closes over."""
    functions: list[types.FunctionType] = []
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < MANY_FUNCTIONS:
        one = _unpacked(waiting.pop(0))
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is types.FunctionType:
            functions.append(one)
            waiting += [content for _, content in cells_of(one) if _is_function(content)]
        elif issubclass(type(one), type):
            waiting += [vars(one)[name] for name in ("__new__", "__init__") if isinstance(vars(one).get(name), types.FunctionType)]
        elif not _is_function(one):  # an object that can be called
            waiting.append(getattr(type(one).__call__, "__wrapped__", type(one).__call__))
        waiting.append(_wrapped(one))
    own = [one for one in functions if not is_installed(one.__code__.co_filename)]
    return own or functions[:1]


def _unpacked(function: Any) -> Any:
    """What a partial or a bound method stands for."""
    while issubclass(type(function), (functools.partial, types.MethodType)):
        function = function.func if issubclass(type(function), functools.partial) else function.__func__
    return function


def _wrapped(value: Any) -> Any:
    """What any object, of whatever package, says that it wraps."""
    try:
        return getattr(value, "__wrapped__", None)
    except unless_of_handler(Exception):  # such as of a proxy for what is not there now
        return None


def _is_function(value: Any) -> bool:
    value = _unpacked(value)
    return type(value) in (types.FunctionType, types.BuiltinFunctionType) or type(_wrapped(value)) is types.FunctionType


def chain_of(value: Any) -> Iterator[types.FunctionType]:
    """A function and what it wraps."""
    for _ in range(MANY_FUNCTIONS):  # some wrap another object at each look
        value = _unpacked(value)
        if value is None:
            return
        if type(value) is types.FunctionType:
            yield value
        value = _wrapped(value)


# -- names -------------------------------------------------------------------------------------------------------------

SCRIPT = ("__main__", "__mp_main__")


def identity_of(function: Any) -> str:
    """``module.qualname`` of a function, a class, a partial or a callable object: the same in each process."""
    while isinstance(function, functools.partial):
        function = function.func
    return place_of(function if isinstance(getattr(function, "__qualname__", None), str) else type(function))


def place_of(named: Any) -> str:
    """``module.qualname`` of a function or class. What was pickled as the inside of a wrapper keeps the name that it had before."""
    return f"{module_of(named)}.{_outside(named.__qualname__)}"


def _outside(qualname: str) -> str:
    while qualname.endswith((".__wrapped__", ".__func__")):
        qualname = qualname.rpartition(".")[0]
    return qualname


def module_of(named: Any) -> str:
    """The module of a function or class. A script is named after its file or its ``python -m`` module, since child processes, and workers
    that the function is sent to, know it under other names. An interactive session stays ``__main__``."""
    module = getattr(named, "__module__", None)
    if not isinstance(module, str):
        return "builtins"
    if module not in SCRIPT:
        return "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
    if _sender is not None:
        return _sender
    lived_in: dict[str, Any] = getattr(named, "__globals__", None) or vars(sys.modules.get("__main__", sys))
    spec, file = lived_in.get("__spec__"), lived_in.get("__file__")
    if spec is not None and spec.name not in SCRIPT:
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] or "__main__" if isinstance(file, str) else "__main__"


_sender: str | None = None


def arrived(function: Any, identity: str) -> None:
    """A function of this identity was sent here. If it is a script's that this process does not run, this process is a worker of that
    script, and names what comes from there as the script does."""
    global _sender
    qualname = _outside(getattr(function, "__qualname__", ""))
    if getattr(function, "__module__", None) in SCRIPT and not hasattr(sys.modules.get("__main__"), qualname.partition(".")[0]):
        _sender = identity.removesuffix(f".{qualname}")
