"""Names of a call's output: the tag that a user sees, and the key under which the output is stored."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Self

INSIDE = (".__wrapped__", ".__func__")
SCRIPT = ("__main__", "__mp_main__")


class Tag(str):
    """A tag: a str that also knows the key under which the output of its call is stored.

    ``given``: False if the tag is the digest of the arguments, since none was given: it fits no pattern of a configuration. Picklable."""

    __slots__ = ("given", "key")
    key: str
    given: bool

    def __new__(cls, tag: str, key: str | None = None, given: bool = True) -> Self:
        self = super().__new__(cls, tag)
        self.key = str(tag) if key is None else key
        self.given = given
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Tag, (str(self), self.key, self.given)


def key_of(identity: str, version: str | None, tag: str, code: str = "") -> str:
    """The key of one call's output: ``module.qualname#code:tag``, or ``module.qualname@version:tag``."""
    return f"{prefix_of(identity, version, code)}{tag}"


def prefix_of(identity: str, version: str | None, code: str = "") -> str:
    """What the keys of a function begin with. Two functions, or versions, never share it. ``code``: a digest, which a version replaces;
    empty if there is neither."""
    if version is not None:
        return f"{_plain(identity)}@{_plain(version)}:"
    return f"{_plain(identity)}#{code}:" if code else f"{_plain(identity)}:"


def any_code_of(identity: str) -> str:
    """What the keys of a function begin with, regardless of its code."""
    return f"{_plain(identity)}#"


def identity_of(function: Any) -> str:
    """``module.qualname`` of a function, a class, a partial or a callable object: the same in each process."""
    while isinstance(function, functools.partial):
        function = function.func
    return place_of(function if isinstance(getattr(function, "__qualname__", None), str) else type(function))


def place_of(named: Any) -> str:
    """``module.qualname`` of a function or class. What was pickled as the inside of a wrapper is called as it was before."""
    return f"{module_of(named)}.{_outside(named.__qualname__)}"


def _outside(qualname: str) -> str:
    while qualname.endswith(INSIDE):
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


def encodable(key: str) -> str:
    """The key itself, with what is not valid Unicode in it (as in some file names) escaped."""
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


def _plain(part: str) -> str:
    """A part of a key, with the characters escaped that separate parts."""
    return part.replace("%", "%25").replace(":", "%3A").replace("@", "%40").replace("#", "%23")
