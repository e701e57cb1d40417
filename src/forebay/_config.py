"""Sizes, ages and settings: read from arguments and the environment, checked once, told in words when they make no sense."""

from __future__ import annotations

import contextvars
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forebay._logs import logger
from forebay.errors import ConfigError

log = logger("forebay.config")

DEFAULT_MAX_AGE = 300.0
"""Seconds for which an entry is served unasked after it was validated."""

LEAST_BUDGET = 64 << 20
"""Text that means a smaller budget is taken for a slip."""

_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]*)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_UNITS: dict[str, int] = {
    f"{letter}{end}": int(base**power)
    for letter, power in _POWERS.items()
    for end, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}

_SHA256 = re.compile("[0-9a-fA-F]{64}")

T = TypeVar("T")
_unsaid: contextvars.ContextVar[bool] = contextvars.ContextVar("forebay_limits_unsaid", default=False)

_TRUE = frozenset({"1", "on", "yes", "true"})
_FALSE = frozenset({"", "0", "off", "no", "false"})
_LEVELS = ("debug", "info", "warning", "error", "critical")


def parse_size(value: int | str, *, total: int | None = None, name: str = "size") -> int:
    """Bytes: an int, or text such as ``"500GB"`` (10^9), ``"500GiB"`` (2^30), ``"100G"`` (10^9), ``"80%"`` (of ``total``).

    ``name`` is what an error calls the value. Raises `ConfigError` for anything else, and for ``%`` where ``total`` is None.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise _wrong(name, value, "a size is not negative")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise _wrong(name, value, 'a size is bytes as an int, or text such as "500GB" (10^9), "500GiB" (2^30) or "80%"')
    number = float(match[1])
    if unit == "%":
        return _share(number, total, name, value)
    if "." not in match[1]:
        return int(match[1]) * _UNITS[unit]  # exact where a float is not
    return int(number * _UNITS[unit])


def parse_budget(value: int | str, *, total: int | None = None, name: str = "budget") -> int:
    """The bytes of a root's budget: as `parse_size` reads them, but text needs a unit and means at least `LEAST_BUDGET`; a share of a
    small disk at least a hundredth of it.

    ``"500"``, where 500 GB were meant, would empty the cache of every process. Raises `ConfigError`."""
    size = parse_size(value, total=total, name=name)
    if isinstance(value, str):
        text = value.strip()
        if not text.endswith("%") and not text[-1].isalpha():
            meant = f"{text}GB" if len(text) < 6 else f"{text}B"
            raise _wrong(name, value, f'a budget needs a unit: say "{meant}" if that is meant')
        if size < (min(LEAST_BUDGET, (total or 0) // 100) if text.endswith("%") else LEAST_BUDGET):
            raise _wrong(name, value, f"less than 64 MiB is hardly meant: if it is, Cache(budget={size}) takes it as an int")
    return size


def _share(percent: float, total: int | None, name: str, value: object) -> int:
    if total is None:
        raise _wrong(name, value, "a share of the disk makes no sense here: give bytes")
    if percent > 100:
        raise _wrong(name, value, "more than the whole disk")
    return int(total * percent / 100)


def format_size(size: float) -> str:
    """``1_500_000`` as ``"1.5 MB"``: three digits, powers of 1000."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.3g} {unit}"
        size /= 1000
    return f"{sign}{size:,.3g} PB" if size < 999.5 else f"{sign}{size:,.0f} PB"


def parse_age(value: float | str, *, name: str = "age") -> float:
    """Seconds: a number, or text such as ``"90s"``, ``"15m"``, ``"12h"``, ``"30d"``, ``"2w"``, ``"forever"`` (infinity).

    Raises `ConfigError` for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isnan(value) or value < 0:
            raise _wrong(name, value, "an age is not negative")
        return float(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("forever", "inf"):
        return math.inf
    match = _AGE.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise _wrong(name, value, 'an age is seconds, or text such as "90s", "15m", "12h", "30d" or "forever"')
    return float(match[1]) * _SECONDS[match[2]]


def parse_timeout(value: float | None, *, name: str = "timeout") -> float | None:
    """Seconds to wait, or None: as long as it takes. Raises `ConfigError` for what is no number, or below zero."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0):
        return value
    raise _wrong(name, value, "a timeout is seconds as a number that is not negative, or None")


def parse_sha256(value: str, *, name: str = "sha256") -> str:
    """A SHA-256 as 64 hexadecimal digits, in lower case. Raises `ConfigError` for anything else."""
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value.lower()
    raise _wrong(name, value, "a SHA-256 is 64 hexadecimal digits")


def format_age(seconds: float) -> str:
    """``90`` as ``"1m"``: the largest unit that fits, rounded down."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def parse_flag(value: str, *, name: str) -> bool:
    """``1 on yes true`` and ``0 off no false`` (or nothing), in any case. Raises `ConfigError` for anything else."""
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise _wrong(name, value, "use 1 or 0")
    return word in _TRUE


def _wrong(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} makes no sense: {why}", name=name, value=str(value))


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """What the environment asks for. None: not said.

    ``budget`` and ``min_free`` stay text, since a share of the disk needs the disk; `parse_size` took them once.
    ``progress``: False silences bars, True draws them without a terminal. ``verbosity``: a level of `logging`.
    """

    home: Path | None = None
    budget: str | None = None
    min_free: str | None = None
    max_age: float = DEFAULT_MAX_AGE
    offline: bool = False
    shared: bool = False
    progress: bool | None = None
    verbosity: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, *, limits: bool = True) -> EnvironmentSettings:
        """Read and check the ``FOREBAY_*`` variables now. Empty counts as unset; without ``limits`` so do budget and free space.

        Raises `ConfigError` naming variable and value."""
        settings, faults = cls.with_faults(environ, limits=limits)
        if faults:
            raise faults[0]
        return settings

    @classmethod
    def with_faults(cls, environ: Mapping[str, str] | None = None, *, limits: bool = True) -> tuple[EnvironmentSettings, list[ConfigError]]:
        """As `from_environment`, but what makes no sense counts as unset, and is told beside."""
        names = {
            name: text
            for name, text in (os.environ if environ is None else environ).items()
            if name.startswith("FOREBAY_") and text.strip()
        }
        if not _unsaid.get():
            _warn_of_unknown(names)
        values, faults = {}, []
        for field, read in _READERS.items():
            name = f"FOREBAY_{field.upper()}"
            if name in names and (field not in _LIMITS or (limits and not _unsaid.get())):
                try:
                    values[field] = read(names[name], name)
                except ConfigError as error:
                    faults.append(error)
        return cls(**values), faults


KNOWN = frozenset({
    *("HOME", "BUDGET", "MIN_FREE", "MAX_AGE", "OFFLINE", "SHARED", "PROGRESS", "VERBOSITY", "CLAIMS", "S3_ANONYMOUS"),
    *("CONNECT_TIMEOUT", "READ_TIMEOUT", "TOTAL_TIMEOUT", "ATTEMPTS", "CONNECTIONS", "STREAMS"),
})  # fmt: skip
"""The variables that anything of Forebay reads, after ``FOREBAY_``."""

_warned: set[str] = set()  # variables that were warned of in this process, and in those that it was forked from


def _warn_of_unknown(names: Iterable[str]) -> None:
    import difflib  # wanted by the few who have mistyped one

    for name in names:
        word = name.removeprefix("FOREBAY_")
        if word not in KNOWN and name not in _warned:
            _warned.add(name)
            near = difflib.get_close_matches(word, KNOWN, 1)
            log.warning("the variable %s is not known%s", name, f": was FOREBAY_{near[0]} meant?" if near else ", and ignored")


def with_limits_unsaid(make: Callable[..., T], *args: Any, **how: Any) -> T:
    """Call ``make``, for which the environment says nothing of limits: a handle that arrives in a process sets none for everybody."""
    token = _unsaid.set(True)
    try:
        return make(*args, **how)
    finally:
        _unsaid.reset(token)


def _level(text: str, name: str) -> str:
    if text.strip().lower() not in _LEVELS:
        raise _wrong(name, text, "use one of " + ", ".join(_LEVELS))
    return text.strip().upper()


def _sensible(text: str, name: str, parse: Callable[..., int]) -> str:
    """The text, which ``parse`` takes."""
    parse(text, total=1, name=name)
    return text


_LIMITS = ("budget", "min_free")
_READERS: dict[str, Callable[[str, str], Any]] = {
    "home": lambda text, name: Path(text).expanduser(),
    "budget": lambda text, name: _sensible(text, name, parse_budget),
    "min_free": lambda text, name: _sensible(text, name, parse_size),
    "max_age": lambda text, name: parse_age(text, name=name),
    "offline": lambda text, name: parse_flag(text, name=name),
    "shared": lambda text, name: parse_flag(text, name=name),
    "progress": lambda text, name: parse_flag(text, name=name),
    "verbosity": _level,
}
"""What makes a setting of a variable's text and name."""


def default_root(*, is_network: Callable[[Path], bool], environ: Mapping[str, str] | None = None) -> Path:
    """Where a cache lies if nobody said: ``$XDG_CACHE_HOME/forebay``, else ``~/.cache/forebay``.

    Where that is on a network file system (``is_network`` is asked of the nearest directory that exists):
    ``forebay-<uid>`` in ``$SLURM_TMPDIR``, else ``$TMPDIR``, else the system's temporary directory, with one warning a process.
    """
    environ = os.environ if environ is None else environ
    usual = _user_cache(environ) / "forebay"
    if not is_network(_nearest(usual)):
        return usual
    places = [Path(text) for name in ("SLURM_TMPDIR", "TMPDIR") if (text := environ.get(name))] + [Path(tempfile.gettempdir())]
    local = [directory for directory in places if directory.is_dir() and not is_network(directory)] or places[-1:]
    root = local[0] / f"forebay-{os.getuid()}"
    if root not in _said:
        _said.add(root)
        log.warning("%s is on a network file system, the cache is in %s: set FOREBAY_HOME to choose a local place", usual, root)
    return root


_said: set[Path] = set()  # places that were warned of in this process


def _user_cache(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG standard: relative paths are to be ignored
        return Path(given)
    try:
        return Path(environ.get("HOME") or Path.home()) / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home directory: set FOREBAY_HOME to a local directory", name="FOREBAY_HOME", value=""
        ) from error


def _nearest(path: Path) -> Path:
    """The path itself, or the closest of its parents that exists."""
    return next((directory for directory in (path, *path.parents) if directory.exists()), Path("/"))
