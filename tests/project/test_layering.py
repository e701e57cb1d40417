"""Who may import whom, who may change a file, who may speak SQL: the order of the rooms is a test, not a wish."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "forebay"

# A room may import what stands to its left, in its own line or through another one. Rooms between two "<" do not import each other.
ORDER = """
    _logs < errors < _model _config_file
    _config_file < _config
    errors < _kernel.greenlets < _kernel.interrupts < _kernel.host
    _model < _kernel.host < _kernel.locks _kernel.mappings < _kernel.waits
    _logs < _kernel.fences < _kernel.mappings
    _model _kernel.interrupts < _kernel.threads < remote
    _model < _kernel.events < _engine.files
    _kernel.host < _kernel.below
    _model _kernel.interrupts < codecs testing
    _kernel.waits _kernel.below _config < world remote
    _kernel.waits _kernel.below _config < _engine.files < _engine.index < _engine.catalog < _engine.leases < _engine.space < _engine.publish
    _engine.publish < _engine.packs
    _engine.leases < _engine.reading
    _engine.space _engine.reading < _engine.check
    _engine.packs < _engine.writers
    _engine.writers _engine.check < _engine.parts < _engine.engine < _engine.spaces
    _engine.engine < _engine.flight
    _engine.spaces < _engine.seeing
    _engine.spaces _engine.flight < _engine.loading
    _engine.loading _engine.seeing < _engine.store _engine.null_store
    _config world remote < claims
    _engine.store _engine.null_store remote < fetch < directories sources
    _engine.store _engine.null_store < reports
    fetch codecs < samples tasks
    sources codecs reports < prefetch
    claims directories samples tasks prefetch reports < cache < checkpoint < adapters
    testing < adapters
    checkpoint testing < cli
"""

# The half of tasks is imported without the half of checkpoints, which needs pyarrow.
RAY = (
    "adapters.ray.checkpoint", "adapters.ray.sessions", "adapters.ray.tasks", "adapters.chia",
)  # fmt: skip

STREAMING = ("adapters.streaming", "adapters.streaming.shared", "adapters.streaming.barrier", "adapters.streaming.prefix")

# Packages that are not ours, and the rooms that may use them. At the head of a module only where LOADED_WITH says so.
THIRD_PARTY = {
    "pycurl": ("remote.http.transfers", "remote.http.loop"),
    "xxhash": ("_engine", "directories", "remote", "fetch", "cache", "prefetch", "tasks"),
    "typing_extensions": ("_model",),  # for type checkers only
    "click": ("cli",),
    "rich": ("cli",),
    "prometheus_client": ("cli.listing",),
    "opentelemetry": ("adapters.opentelemetry",),
    "pytest": ("adapters.pytest",),
    "IPython": ("cache.notebook",),
    "botocore": ("remote.s3.aws",),
    "fsspec": ("remote.filesystems.clients", "adapters.fsspec", "adapters.ray.checkpoint"),
    "pyarrow": ("remote.filesystems.clients", "codecs.plain", "adapters.ray.checkpoint"),
    "ray": RAY,
    "cloudpickle": ("remote.filesystems", "codecs.by_value"),
    "yaml": ("tasks.config",),
    "numpy": ("codecs.arrays", "claims.shared", "claims", *STREAMING),
    "torch": ("codecs.arrays", "adapters.torch"),
    "pytorch_pfn_extras": ("adapters.pfio.base",),
    "megatron": ("adapters.energon",),
    "joblib": ("adapters.joblib",),
}
LOADED_WITH = {
    "xxhash": ("_engine", "directories", "remote", "fetch", "cache", "prefetch", "tasks"),
    "click": ("cli",),
    "rich": ("cli",),
    "pycurl": ("remote.http.transfers", "remote.http.loop"),
    "torch": ("adapters.torch",),
    "megatron": ("adapters.energon",),
    "joblib": ("adapters.joblib",),
    "ray": RAY,
    "pyarrow": ("adapters.ray.checkpoint",),
    "numpy": STREAMING,
    "fsspec": ("adapters.fsspec",),
    "pytest": ("adapters.pytest",),
}

CHANGING = frozenset(
    {"chmod", "chown", "copy_file_range", "fchmod", "fchown", "ftruncate", "lchown", "link", "makedirs", "mkdir", "mkfifo", "mknod"}
    | {"posix_fallocate", "pwrite", "pwritev", "remove", "removedirs", "removexattr", "rename", "renames", "replace", "rmdir"}
    | {"sendfile", "setxattr", "splice", "symlink", "truncate", "unlink", "utime", "write", "writev"}
)
CREATING_FLAGS = frozenset({"O_APPEND", "O_CREAT", "O_TMPFILE", "O_TRUNC", "O_WRONLY"})
BARE_METHODS = frozenset({"mkdir", "rmdir", "touch", "unlink"})  # of a path, called without an operand
PATH_METHODS = frozenset({"chmod", "hardlink_to", "lchmod", "rename", "symlink_to", "write_bytes", "write_text"})
CHANGING_MODULES = frozenset({"fcntl", "mmap", "shutil", "tempfile"})


def name_of(path: Path) -> str:
    """The dotted name of a module, without the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def below() -> dict[str, set[str]]:
    """For each room all rooms that it may import."""
    under: dict[str, set[str]] = {}
    for line in ORDER.strip().splitlines():
        groups = [group.split() for group in line.split("<")]
        for room in groups[0]:
            under.setdefault(room, set())
        for left, right in itertools.pairwise(groups):
            for room in right:
                under.setdefault(room, set()).update(left)
    while True:
        wider = {room: low.union(*(under[r] for r in low)) for room, low in under.items()}
        if wider == under:
            return under
        under = wider


BELOW = below()


def room_of(module: str) -> str:
    """The room that a module belongs to: the longest of the names in ORDER that begins its own."""
    rooms = [room for room in BELOW if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default="")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_module(dotted: str) -> str | None:
    """The module of ours that an imported name lies in (``""``: the package's own root); None if it is not ours."""
    if dotted.partition(".")[0] != "forebay":
        return None
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in MODULES.keys() | BELOW.keys():
        parts.pop()
    return ".".join(parts)


def lies_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def breaches_of_order(module: str, source: str) -> list[str]:
    room, found = room_of(module), []
    for line, dotted in imports(ast.parse(source)):
        target = own_module(dotted)
        if target is None or room_of(target) == room:
            continue
        if target in ("", "_kernel", "_engine"):
            if dotted != "forebay.__version__" and not (target == "" and room == "cli"):
                found.append(f"{module}:{line} imports {dotted}: name the room")
        elif room_of(target) not in BELOW[room]:
            found.append(f"{module}:{line} imports {target}, which does not stand to the left of {room}")
    return found


def all_breaches(look: Callable[[str, str], list[str]], modules: Iterable[str]) -> list[str]:
    """What ``look`` finds in these modules. One test for all of them: a test for each would take longer than what it does."""
    return [breach for module in modules for breach in look(module, MODULES[module].read_text())]


def test_a_room_imports_only_what_stands_to_its_left() -> None:
    modules = [m for m in MODULES if m not in ("", "_kernel", "_engine")]
    assert [module for module in modules if not room_of(module)] == [], "these have no place in ORDER"
    assert all_breaches(breaches_of_order, modules) == []


@pytest.mark.parametrize(
    "package", [m for m in MODULES if m.partition(".")[0] in ("_kernel", "_engine") and PACKAGE.joinpath(*m.split(".")).is_dir()]
)
def test_a_package_of_rooms_is_not_a_door(package: str) -> None:
    """Else a thread that imports the package, and with it a module of it, and a thread that imports that module, wait for one another."""
    assert list(imports(ast.parse(MODULES[package].read_text()))) in ([], [(3, "__future__.annotations")])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def third_party_breaches(module: str, source: str) -> list[str]:
    tree, found = ast.parse(source), []
    late = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(n)]
    in_functions = {line for node in late for line, _ in imports(node)}
    for line, dotted in imports(tree):
        top = dotted.partition(".")[0]
        if top in sys.stdlib_module_names or top == "forebay":
            continue
        if not lies_in(module, THIRD_PARTY.get(top, ())):
            found.append(f"{module}:{line} uses {top}")
        elif line not in in_functions and not lies_in(module, LOADED_WITH.get(top, ())):
            found.append(f"{module}:{line} loads {top} when it is imported")
    return found


def test_each_foreign_package_has_its_one_place() -> None:
    assert all_breaches(third_party_breaches, MODULES) == []


def mode_of(call: ast.Call, position: int) -> str | None:
    """The mode that `open` is given; None where it cannot be read off the source."""
    given = [k.value for k in call.keywords if k.arg == "mode"] or call.args[position : position + 1]
    if not given:
        return "r"
    return given[0].value if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str) else None


def writes(mode: str | None) -> bool:
    return mode is None or bool(set(mode) & set("wax+"))


def changes_a_file(call: ast.Call) -> str | None:
    """What a call would change, if it can change a file."""
    names = {
        n.attr if isinstance(n, ast.Attribute) else n.id for a in call.args for n in ast.walk(a) if isinstance(n, (ast.Attribute, ast.Name))
    }
    match call.func:
        case ast.Name("open") if writes(mode_of(call, 1)):
            return "open to write"
        case ast.Attribute(ast.Name("os"), name) if name in CHANGING:
            return f"os.{name}"
        case ast.Attribute(ast.Name("os"), "open") | ast.Attribute(ast.Name("host"), "open_fd") if names & CREATING_FLAGS:
            return f"open with {', '.join(sorted(names & CREATING_FLAGS))}"
        case ast.Attribute(ast.Name("os" | "io" | "codecs"), "open" | "fdopen") if call.func.attr == "fdopen" and writes(mode_of(call, 1)):
            return "fdopen to write"
        case ast.Attribute(ast.Name("io" | "codecs"), "open") if writes(mode_of(call, 1)):
            return "open to write"
        case ast.Attribute(ast.Name("host" | "kernel_host"), _):
            return None
        case ast.Attribute(_, name) if (name in PATH_METHODS and len(call.args) == 1) or (name in BARE_METHODS and not call.args):
            return f".{name}()"
        case ast.Attribute(ast.Name("Path") | ast.Call(), "open") if writes(mode_of(call, 0)):
            return ".open() to write"
    return None


def file_breaches(module: str, source: str) -> list[str]:
    """Calls that change a file without passing by `_kernel/host.py`, and SQL outside the catalog."""
    tree = ast.parse(source)
    found = [f"{module}:{n.lineno} {what}" for n in ast.walk(tree) if isinstance(n, ast.Call) and (what := changes_a_file(n))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"{module}:{node.lineno} os by another name" for alias in node.names if alias.name == "os" and alias.asname]
    for line, dotted in imports(tree):
        top, _, rest = dotted.partition(".")
        if (
            top in CHANGING_MODULES
            and not (top == "fcntl" and module == "_kernel.locks")
            and not (top == "mmap" and module == "_kernel.mappings")
        ):
            found.append(f"{module}:{line} imports {top}")
        if top == "os" and (rest in CHANGING or rest == "open"):
            found.append(f"{module}:{line} imports os.{rest} by name")
        if top == "sqlite3" and not lies_in(module, ("_engine.catalog",)):
            found.append(f"{module}:{line} speaks SQL")
        if top == "ctypes" and not lies_in(module, ("_kernel",)):
            found.append(f"{module}:{line} calls into C")
    return found


def test_every_change_of_a_file_is_a_crash_point() -> None:
    modules = [m for m in MODULES if lies_in(m, ("_kernel", "_engine")) and m != "_kernel.host"]
    assert len(modules) > 20
    assert all_breaches(file_breaches, modules) == []


NEW_DESCRIPTORS = {
    ("os", "open"), ("os", "dup"), ("os", "eventfd"), ("os", "memfd_create"), ("os", "pipe"), ("os", "pipe2"), ("select", "epoll"),
    ("socket", "socketpair"),
}  # fmt: skip
"""Calls that may give a new file the number of a standard stream that is closed."""


def standard_breaches(source: str) -> list[str]:
    """Descriptors that a function has made, and not passed through `host.not_standard`."""
    found = []
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        made = [n.func for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        if not any(func.attr == "not_standard" for func in made):
            new = [func for func in made if isinstance(func.value, ast.Name) and (func.value.id, func.attr) in NEW_DESCRIPTORS]
            found += [f"{func.lineno} {ast.unparse(func)}" for func in new]
    return found


def test_no_file_takes_the_place_of_a_standard_stream() -> None:
    modules = MODULES.keys() - {"_kernel.host", "_config_file", "adapters.ray.cleanup"}  # the last two are by themselves
    assert {m: found for m in sorted(modules) if (found := standard_breaches(MODULES[m].read_text()))} == {}


def test_the_look_for_descriptors_sees() -> None:
    assert standard_breaches("def f():\n    return os.open(p, os.O_RDONLY)") == ["2 os.open"]
    assert standard_breaches("def f():\n    return host.not_standard(os.eventfd(0))") == []


BY_PATH = {"create", "create_unnamed", "give_name", "open_fd", "open_write", "rename", "link", "unlink", "mkdir", "rmdir"}


def link_breaches(source: str) -> list[str]:
    """Calls that go by a path through directories in which somebody may have put a symbolic link, and not by `Root.files`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("host"), name)) if name in BY_PATH:
                found.append(f"{node.lineno} host.{name}")
            case ast.Call(ast.Attribute(ast.Name("os"), "open" | "listdir" | "unlink" as name)):
                found.append(f"{node.lineno} os.{name}")
            case ast.Call(ast.Attribute(ast.Name("locks"), "LockFile" | "Claims"), [_]) | ast.Call(ast.Attribute(_, "Words"), [_]):
                found.append(f"{node.lineno} a file that is opened by its path")
    return found


def test_the_engine_follows_no_link() -> None:
    # The way to a root is the user's own; what lies in its top is named, not walked to.
    modules = [m for m in MODULES if lies_in(m, ("_engine",)) and m not in ("_engine.files.root", "_engine.files.layout")]
    assert len(modules) > 20
    assert all_breaches(lambda module, source: [f"{module}:{breach}" for breach in link_breaches(source)], modules) == []


@pytest.mark.parametrize(
    "line", ["host.unlink(p)", "os.open(p, 0)", "os.listdir(p)", "locks.LockFile(root.lock('keys'))", "waits.Words(p)"]
)
def test_the_look_for_links_sees(line: str) -> None:
    assert link_breaches(line) != []


@pytest.mark.parametrize(
    "line",
    [
        "os.rename(a, b)",
        "os.open(p, os.O_RDWR | os.O_CREAT, 0o600)",
        "os.open(p, os.O_WRONLY)",
        "open(p, 'w')",
        "open(p, mode='r+b')",
        "open(p, mode)",
        "os.fdopen(fd, 'wb')",
        "io.open(p, 'a')",
        "Path(p).write_text('x')",
        "root.path.unlink()",
        "(a / b).mkdir()",
        "Path(p).open('w')",
        "import shutil",
        "import tempfile",
        "import os as system",
        "from os import unlink",
        "import mmap",
        "import sqlite3",
        "import ctypes",
    ],
)
def test_the_lint_sees(line: str) -> None:
    assert file_breaches("_engine.space.budget", line) != []


@pytest.mark.parametrize(
    "line",
    [
        "host.unlink(p)",
        "host.rename(a, b)",
        "open(p, 'rb')",
        "os.open(p, os.O_RDWR | os.O_CLOEXEC)",
        "a.replace('x', 'y')",
        "slots.touch(1)",
    ],
)
def test_the_lint_lets_pass(line: str) -> None:
    assert file_breaches("_engine.space.budget", line) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("errors", "from forebay import _model"),
        ("_kernel.host", "from forebay._kernel.locks import LockFile"),
        ("_kernel.mappings", "import forebay._kernel.locks"),
        ("_engine.index.records", "from forebay._engine.catalog.connection import Catalog"),
        ("_engine.leases", "def f():\n    from forebay._engine.space.budget import Budget"),
        ("_engine.flight", "from forebay import remote"),
        ("remote.http", "from forebay._engine.store import Store"),
        ("remote", "from forebay import Cache"),
    ],
)
def test_the_order_is_felt(module: str, line: str) -> None:
    assert breaches_of_order(module, line) != []


def test_foreign_packages_are_felt() -> None:
    assert third_party_breaches("_engine.flight", "import torch") != []
    assert third_party_breaches("remote.s3.aws", "import botocore.session") != []
    assert third_party_breaches("remote.s3.aws", "class A:\n    def f():\n        import botocore.session") == []


def child(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_forebay_loads_the_standard_library_only() -> None:
    loaded = child("before = set(sys.modules)\nimport forebay\nprint(*{m.partition('.')[0] for m in set(sys.modules) - before})").split()
    assert [m for m in loaded if m not in sys.stdlib_module_names and m != "forebay"] == []


def test_importing_forebay_takes_60_ms() -> None:
    # Of the processor: other processes on the machine do not count.
    clock = "import time; t = time.process_time(); import forebay; print(time.process_time() - t)"
    assert min(float(child(clock)) for _ in range(7)) <= 0.060
