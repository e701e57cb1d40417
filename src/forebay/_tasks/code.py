"""The code of a function as bytes: its normalised syntax tree, or its bytecode where there is no source.

The tree is the same on every version of Python; comments, docstrings and formatting are no part of it. A source counts only if it compiles
to the very bytecode that the function runs: a file may have been edited since it was imported, or rewritten on its way in.
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import linecache
import operator
import os
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # cells of notebooks have it; elsewhere it changes nothing
_FUTURE = functools.reduce(operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)) & ~0x10
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_NO_PART = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_compiling = threading.Lock()  # filters of warnings are of the process


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
    """A statement that does nothing: `pass`, a docstring or another constant that stands alone."""
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
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of all within it, the innermost first."""
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from codes_in(value)
    yield code


# -- sources -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """What lies in one file or cell. ``functions``: code and tree, by name. Of the module's variables: ``constants`` are given values
    without calling anything, and only outside of functions; ``literals`` are dicts, lists and sets that are written out, once."""

    functions: Mapping[str, list[tuple[types.CodeType, ast.AST]]]
    constants: frozenset[str]
    literals: Mapping[str, ast.expr]

    def find(self, code: types.CodeType) -> ast.AST | None:
        """The tree of a function; None where the source is not what it runs."""
        same = [(found, node) for found, node in self.functions.get(code.co_name, ()) if shape_of(found) == shape_of(code)]
        best = max(
            same, key=lambda pair: (pair[0].co_qualname == code.co_qualname, pair[0].co_firstlineno == code.co_firstlineno), default=None
        )
        return best[1] if best is not None else None


def _source_of(code: types.CodeType, namespace: dict[str, Any]) -> Source | None:
    """Where a function was written; None where that cannot be had. ``namespace``: its globals, by which sources in archives are found."""
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
def _parsed(text: str, name: str, flags: int) -> Source:
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was told when it was imported
        tree = ast.parse(text, name)
        whole = compile(tree, name, "exec", flags=flags | _FLAGS, dont_inherit=True)
    nodes: dict[tuple[str, int], list[ast.AST]] = {}
    rebound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            nodes.setdefault((getattr(node, "name", "<lambda>"), first), []).append(node)
        elif isinstance(node, ast.Global):
            rebound.update(node.names)
    functions: dict[str, list[tuple[types.CodeType, ast.AST]]] = {}
    for code in codes_in(whole):
        found = _written_at(code, nodes.get((code.co_name, code.co_firstlineno), []))
        if found is not None:
            functions.setdefault(code.co_name, []).append((code, found))
    bound = {name: values for name, values in _bound(tree).items() if name not in rebound}
    constants = frozenset(name for name, values in bound.items() if all(map(_is_constant, values)))
    literals = {name: values[0] for name, values in bound.items() if len(values) == 1 and isinstance(values[0], _DISPLAYS)}
    return Source(functions, constants, literals)


_DISPLAYS = (ast.Dict, ast.List, ast.Set)


def _written_at(code: types.CodeType, nodes: list[ast.AST]) -> ast.AST | None:
    """Which of the functions of one name on one line this code is of: it is taken out. The innermost are asked for first."""
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
    """What the module's variables are given as values, outside of functions: None for what no expression says."""
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


def _is_constant(value: ast.expr | None) -> bool:
    """Whether an expression gives the same in each process."""
    return value is not None and not any(isinstance(part, _CALLS) for part in ast.walk(value))


_CALLS = (ast.Call, ast.Attribute, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Starred)


# -- functions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """How a function was written. ``code``: bytes that only equal code shares. ``constants``: whether a global name is a constant of
    its module; None where the module has no source. ``literals``: see `Source`."""

    code: bytes
    constants: frozenset[str] | None
    literals: Mapping[str, ast.expr]


def written(function: types.FunctionType) -> Written:
    """How a function was written, as far as that can be told. Looked up once for each code and file."""
    code = function.__code__
    known = _known.setdefault(code, {})
    found = known.get(code.co_filename)
    if found is None:
        found = known[code.co_filename] = _looked_up(code, function.__globals__)
    return found


def _looked_up(code: types.CodeType, namespace: dict[str, Any]) -> Written:
    source = _source_of(code, namespace)
    node = source.find(code) if source is not None else None
    try:
        content = b"T" + tree_of(node) if node is not None else b"C" + shape_of(code)
    except RecursionError:
        content = b"C" + shape_of(code)
    content = content[:1] + xxhash.xxh3_128_digest(content)
    if source is None or not isinstance(namespace.get("__file__"), str):  # typed in: what it names lies in other cells
        return Written(content, None, {})
    names = names_read_by(code)
    return Written(content, source.constants & names, {name: node for name, node in source.literals.items() if name in names})


_known: weakref.WeakKeyDictionary[types.CodeType, dict[str, Written]] = weakref.WeakKeyDictionary()


@functools.lru_cache(1024)
def names_read_by(code: types.CodeType) -> frozenset[str]:
    """The global names that a function, or one within it, reads and does not set."""
    read, stored = set(), set()
    for part in codes_in(code):
        for step in dis.get_instructions(part):
            if step.opname in _LOADS:
                read.add(str(step.argval))
            elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(str(step.argval))
    return frozenset(name for name in read - stored if not name.startswith("__"))


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
